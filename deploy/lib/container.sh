# The image, and the command that starts a container of it.
# shellcheck shell=bash

readonly HTTP_INSIDE=8000 GRPC_INSIDE=8001 METRICS_INSIDE=8002
readonly REPOSITORY_INSIDE=/repository ARTIFACTS_INSIDE=/artifacts
# Threads and processes together: the stages of a 16-core machine have about 600.
readonly PIDS_LIMIT=4096

# get_image: builds or pulls the image where that is asked for or needed; returns 1 with a message.
get_image() {
    local image root entry arguments=()
    image=$(option image)
    if [[ -n ${OPTION[build]-} && -n ${OPTION[pull]-} ]]; then
        error "--build and --pull: say one of the two"
        return 1
    fi
    if [[ -n ${OPTION[build]-} ]]; then
        root=$(dirname -- "$DEPLOY_DIR")
        [[ -x $root/scripts/image/build ]] || {
            error "--build: there is no scripts/image/build in $root: run the script of a checkout, or --pull"
            return 1
        }
        if [[ -n ${OPTION[build-option]-} ]]; then
            while IFS= read -r entry; do arguments+=("$entry"); done <<<"${OPTION[build-option]}"
        fi
        say "building $image …"
        # The build's own output is progress, too.
        run "$root/scripts/image/build" "$image" "${arguments[@]}" >&"$(result_or_progress)" || {
            error "$image was not built: the lines above say why"
            return 1
        }
    elif [[ -n ${OPTION[pull]-} ]] || ! image_here "$image"; then
        say "pulling $image …"
        run docker pull "$image" >&"$(result_or_progress)" || {
            error "$image cannot be pulled: check the name and 'docker login', or build it here with --build"
            return 1
        }
    fi
}

# A command that a dry run prints is its result; what the command itself prints is progress.
result_or_progress() { if [[ -n $DRY_RUN ]]; then echo 1; else echo 2; fi; }

# check_image: whether the image may be run as it is; after get_image.
check_image() {
    local user
    image_here "$(option image)" || return 0 # a dry run
    user=$(image_field "$(option image)" '{{.Config.User}}')
    user=${OPTION[user]-$user}
    case ${user%%:*} in
    '')
        error "$(option image) does not say whom it runs as, so it would be root: give --user UID:GID"
        return 1
        ;;
    0 | root)
        if [[ -z ${OPTION[user]-} ]]; then
            error "$(option image) runs as root: give --user UID:GID, or --user 0 if that is meant"
            return 1
        fi
        warn "the server runs as root in its container"
        ;;
    esac
}

# mount_field NAME VALUE: a field of --mount, whose syntax is CSV.
mount_field() {
    local field="$1=$2"
    if [[ $field == *[,\"]* ]]; then field="\"${field//\"/\"\"}\""; fi
    printf '%s' "$field"
}

# artifacts: the volume's name, or the directory.
artifacts() { printf '%s' "${OPTION[artifacts]-$(slug)-artifacts}"; }

# guarded ROLE NAME: what every container of ours is started with; appends to the array RUN.
guarded() {
    RUN+=(docker run --detach --name "$2" --hostname "${2:0:63}"
        --label "$LABEL.name=$(option name)" --label "$LABEL.role=$1"
        --restart no --read-only --cap-drop ALL --security-opt no-new-privileges --pids-limit "$PIDS_LIMIT"
        --tmpfs '/tmp:rw,nosuid,nodev,noexec,size=1g,mode=1777'
        --log-driver json-file --log-opt max-size=10m --log-opt max-file=5)
}

# published ADDRESS OUTSIDE INSIDE: the argument of --publish.
published() {
    if [[ $1 == *:* ]]; then printf '[%s]:%s:%s' "$@"; else printf '%s:%s:%s' "$@"; fi
}

# compose_run SLOT: fills the array RUN with the docker run command of the server's container.
compose_run() {
    local slot=$1 address http grpc metrics artifacts name entry
    RUN=()
    guarded server "$(container_name "$slot")"
    address=$(address_of "$slot")
    read -r http grpc metrics <<<"$(ports_of "$slot")"
    RUN+=(--label "$LABEL.slot=$slot" --stop-timeout "$(option stop-timeout)" --shm-size "$(option shm-size)"
        --publish "$(published "$address" "$http" "$HTTP_INSIDE")"
        --publish "$(published "$address" "$grpc" "$GRPC_INSIDE")"
        --publish "$(published "$address" "$metrics" "$METRICS_INSIDE")")
    for name in "${KEPT_OPTIONS[@]}"; do
        if [[ -n ${OPTION[$name]-} ]]; then RUN+=(--label "$LABEL.option.$name=${OPTION[$name]}"); fi
    done
    if [[ -n ${OPTION[proxy]-} ]]; then RUN+=(--network "$(network)"); fi
    case $GPUS in
    none) ;;
    all) RUN+=(--gpus all) ;;
    *) RUN+=(--gpus "\"device=$GPUS\"") ;; # the quotes are docker's: a list is one CSV field
    esac
    if [[ -n ${OPTION[repository]-} ]]; then
        RUN+=(--mount "type=bind,$(mount_field source "${OPTION[repository]}"),target=$REPOSITORY_INSIDE,readonly")
        # For the photos in it: docker's health check cannot know what serve is told.
        RUN+=(--env "TRITON_VISION_HEALTH_REPOSITORY=$REPOSITORY_INSIDE")
    fi
    artifacts=$(artifacts)
    if [[ $artifacts == /* ]]; then
        RUN+=(--mount "type=bind,$(mount_field source "$artifacts"),target=$ARTIFACTS_INSIDE")
    else
        RUN+=(--mount "type=volume,source=$artifacts,target=$ARTIFACTS_INSIDE")
    fi
    # What must answer for the start to count must answer for docker to call the container healthy.
    if [[ -n ${OPTION[ensemble]-} ]]; then RUN+=(--env "TRITON_VISION_HEALTH_MODEL=${OPTION[ensemble]}"); fi
    if [[ -n ${OPTION[user]-} ]]; then RUN+=(--user "${OPTION[user]}"); fi
    if [[ -n ${OPTION[container-env-file]-} ]]; then RUN+=(--env-file "${OPTION[container-env-file]}"); fi
    if [[ -n ${OPTION[docker-option]-} ]]; then
        while IFS= read -r entry; do RUN+=("$entry"); done <<<"${OPTION[docker-option]}"
    fi
    # The last of two equal options counts, so these come before those that the operator adds.
    RUN+=("$(option image)" --artifacts "$ARTIFACTS_INSIDE")
    if [[ -n ${OPTION[repository]-} ]]; then RUN+=(--repository "$REPOSITORY_INSIDE"); fi
    if [[ -n ${OPTION[config-name]-} ]]; then RUN+=(--config-name "${OPTION[config-name]}"); fi
    if [[ -n ${OPTION[serve-arguments]-} ]]; then
        while IFS= read -r entry; do RUN+=("$entry"); done <<<"${OPTION[serve-arguments]}"
    fi
}

# start_container: runs RUN; returns 2 with docker's reason if docker refuses.
start_container() {
    local why
    if [[ -n $DRY_RUN ]]; then
        print_command "${RUN[@]}"
        return 0
    fi
    if why=$("${RUN[@]}" 2>&1 >/dev/null); then return 0; fi
    why=$(grep -m 1 '^docker: ' <<<"$why" || grep -m 1 . <<<"$why") || true
    why=${why#docker: }
    error "docker does not start the container: ${why#Error response from daemon: }"
    return "$EXIT_CANNOT"
}
