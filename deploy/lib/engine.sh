# The Docker engine: is it there, what of ours is in it, and one deployment at a time.
# shellcheck shell=bash

readonly LABEL=triton-vision.deploy
# What must be there is older than what is looked for: --mount, --gpus, health states, several label filters.
readonly MIN_DOCKER=20.10

ENGINE_ID='' ENGINE_ROOT='' ENGINE_RUNTIMES=''
LOCK_FILE='' # while this script holds it

# need_engine: returns 1 with a message where docker cannot be used.
need_engine() {
    local version why context
    if ! command -v docker >/dev/null; then
        error "there is no docker here: install Docker Engine $MIN_DOCKER or newer (docs.docker.com/engine/install)"
        return 1
    fi
    context=$(docker context inspect --format '{{.Endpoints.docker.Host}}' 2>/dev/null) || context=''
    context=${DOCKER_HOST:-$context}
    if [[ -n $context && $context != unix://* ]]; then
        error "docker talks to $context, another machine: run this script there, where the ports and GPUs are"
        return 1
    fi
    if ! version=$(docker version --format '{{.Server.Version}}' 2>&1); then
        why=${version##*$'\n'}
        case $version in
        *"permission denied"*)
            error "this user may not use docker: run this as root, or add the user to the group docker ($why)"
            ;;
        *) error "the docker engine does not answer: start it (systemctl start docker) ($why)" ;;
        esac
        return 1
    fi
    if ! older_or_equal "$MIN_DOCKER" "$version"; then
        error "this is Docker $version: install $MIN_DOCKER or newer"
        return 1
    fi
    IFS='|' read -r ENGINE_ID ENGINE_ROOT ENGINE_RUNTIMES \
        < <(docker info --format '{{.ID}}|{{.DockerRootDir}}|{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' 2>/dev/null)
}

# older_or_equal A B: whether version A is not newer than B.
older_or_equal() {
    [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]
}

# lock: from here to the end of this script no other one changes the same deployment. The lock is a file that any user
# of the engine can open; the kernel drops it with this process, however it ends.
lock() {
    [[ -z $DRY_RUN ]] || return 0
    local folder file
    command -v flock >/dev/null || die "there is no flock here: install util-linux"
    for folder in /run/lock /tmp; do
        if [[ -d $folder && -w $folder ]]; then break; fi
    done
    file=$folder/triton-vision-$(digest "$ENGINE_ID/$(option name)").lock
    while true; do
        if [[ ! -e $file ]]; then (umask 000 && set -o noclobber && : >"$file") 2>/dev/null || true; fi
        # Opened for reading: a file of another user in a sticky folder may not be opened to be created.
        exec 9<"$file" || die "the lock $file cannot be opened: remove it"
        flock --exclusive --nonblock 9 ||
            die "another deploy-triton.sh is at work on '$(option name)': wait until it has ended"
        # Unless its last holder has just removed it, and the next one makes another.
        if [[ $file -ef /dev/fd/9 ]]; then break; fi
    done
    LOCK_FILE=$file
    trap clean_up EXIT
    exit_on_signals
}

exit_on_signals() {
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
}

digest() { printf '%s' "$1" | sha256sum | cut -c 1-12; }

# slug: the deployment's name as docker allows it in names; another one for each name.
slug() {
    local name
    name=$(option name)
    if [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]]; then
        printf '%s' "$name"
    else
        printf 'd%s-%s' "$(printf '%s' "$name" | tr -c 'A-Za-z0-9_.-' -)" "$(digest "$name")"
    fi
}

container_name() { printf '%s-%s' "$(slug)" "$1"; }

# containers ROLE: the ids of this deployment's containers, running or not, oldest first. ROLE: server or proxy.
containers() {
    docker ps --all --quiet --no-trunc --filter "label=$LABEL.name=$(option name)" --filter "label=$LABEL.role=$1" |
        tac
}

# inspect CONTAINER FORMAT; nothing where it is gone.
inspect() { docker inspect --type container --format "$2" "$1" 2>/dev/null || true; }

label_of() { inspect "$1" "{{index .Config.Labels \"$LABEL.$2\"}}"; }

status_of() { inspect "$1" '{{.State.Status}}'; }

# health_of CONTAINER: healthy, unhealthy, starting, or none where the image has no health check.
health_of() { inspect "$1" '{{if .State.Health}}{{.State.Health.Status}}{{else}}none{{end}}'; }

# A container that has once been ready is restarted by docker; one that has not been is no more than an attempt.
promoted() { [[ $(inspect "$1" '{{.HostConfig.RestartPolicy.Name}}') == unless-stopped ]]; }

image_here() { docker image inspect "$1" >/dev/null 2>&1; }

image_field() { docker image inspect --format "$2" "$1" 2>/dev/null || true; }

# remove CONTAINER…: with the anonymous volumes that its image declares.
remove() { run_quietly docker rm --force --volumes "$@"; }
