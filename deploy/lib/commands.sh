# The commands.
# shellcheck shell=bash

SERVED='' WHY='' RUN=()
ATTEMPT=() # containers that this run started and that nobody relies on yet

# However this script ends, what it began and did not finish is removed.
clean_up() {
    trap - EXIT
    trap '' INT TERM HUP
    local name
    [[ -z $DRY_RUN ]] || return 0
    for name in "${ATTEMPT[@]}"; do
        # A name that was taken belongs to somebody else.
        if [[ $(label_of "$name" name) == "$(option name)" ]]; then
            say "removing $name …"
            remove "$name" || true
        fi
    done
    if ((${#ATTEMPT[@]})) && [[ -z $(containers server) ]]; then remove_network; fi
    # Another user's, in a sticky folder, stays.
    rm -f -- "$LOCK_FILE" 2>/dev/null || true
}

remove_network() {
    local owner
    owner=$(docker network inspect --format "{{index .Labels \"$LABEL.name\"}}" "$(network)" 2>/dev/null) || return 0
    if [[ $owner == "$(option name)" ]]; then run_quietly docker network rm "$(network)"; fi
}

# load_kept CONTAINER: takes what is not said from the labels of a container.
load_kept() {
    local name labels
    # shellcheck disable=SC2016  # docker expands it
    labels=$(inspect "$1" '{{range $name, $_ := .Config.Labels}}{{println $name}}{{end}}')
    for name in "${KEPT_OPTIONS[@]}"; do
        if [[ -z ${OPTION[$name]+set} && $'\n'$labels$'\n' == *$'\n'"$LABEL.option.$name"$'\n'* ]]; then
            OPTION["$name"]=$(label_of "$1" "option.$name")
        fi
    done
}

# survey: what there is of the deployment. ACTIVE: the containers that serve or are to serve, oldest first; REST: what
# is left of attempts and of crashes.
survey() {
    local container
    ACTIVE=() REST=()
    for container in $(containers server); do
        if promoted "$container" && [[ $(status_of "$container") == @(running|restarting|paused) ]]; then
            ACTIVE+=("$container")
        else
            REST+=("$container")
        fi
    done
}

remove_rest() {
    local container
    for container in "${REST[@]}"; do
        say "removing $(inspect "$container" '{{.Name}}' | tr -d /), which is $(status_of "$container") …"
        remove "$container"
    done
}

# prepare SLOT…: image, GPUs, disk, ports; exits if anything is amiss, and in a dry run goes on.
prepare() {
    local failed=''
    check_machine "$@" || failed=yes
    if [[ -z $failed || -n $DRY_RUN ]]; then
        get_image && get_proxy_image && check_image && check_driver || failed=yes
    fi
    [[ -z $failed ]] || FAILED=yes
    [[ -z $failed || -n $DRY_RUN ]] || exit "$EXIT_CANNOT"
}

# bring_up SLOT [healthy]: starts a container and waits; returns the exit code, with the reason said, if it does not come
# to serve.
bring_up() {
    local name
    name=$(container_name "$1")
    compose_run "$1"
    ATTEMPT+=("$name")
    start_container || return "$EXIT_CANNOT"
    if [[ -n $DRY_RUN ]]; then
        printf '# wait until it answers an image%s\n' "${2:+ and docker says $2}"
        return 0
    fi
    say "$name: waiting until it serves, at most $(option timeout) s …"
    if ! wait_ready "$@"; then
        error "$name does not serve: $WHY"
        explain "$name"
        return "$EXIT_NOT_SERVING"
    fi
}

# promote SLOT: from here on docker restarts it, after a crash and with the machine, and this script keeps it.
promote() {
    run_quietly docker update --restart unless-stopped "$(container_name "$1")"
    ATTEMPT=()
}

# -- start ----------------------------------------------------------------------------------------------------------

command_start() {
    FAILED=''
    validate_start
    if ! need_engine; then
        [[ -n $DRY_RUN ]] || exit "$EXIT_CANNOT"
        FAILED=yes
    fi
    lock
    ACTIVE=() REST=()
    if [[ -z $FAILED ]]; then survey; fi
    if ((${#ACTIVE[@]})); then
        die "'$(option name)' runs already: use replace to exchange it, stop to end it, or another --name and ports"
    fi
    remove_rest
    if [[ -z $FAILED ]]; then remove_proxy; fi
    if [[ -n ${OPTION[proxy]-} ]]; then prepare blue proxy; else prepare blue; fi
    start_network
    bring_up blue || exit
    if [[ -n ${OPTION[proxy]-} ]]; then
        ATTEMPT+=("$(container_name proxy)")
        start_proxy || exit
        run_quietly docker update --restart unless-stopped "$(container_name proxy)"
    fi
    promote blue
    if [[ -n $DRY_RUN ]]; then
        [[ -z $FAILED ]] || exit "$EXIT_CANNOT"
        return 0
    fi
    print_usage blue "$SERVED"
}

remove_proxy() {
    local container
    for container in $(containers proxy); do remove "$container"; done
}

# -- replace --------------------------------------------------------------------------------------------------------

command_replace() {
    local old slot new container image code
    FAILED=''
    need_engine || exit "$EXIT_CANNOT"
    lock
    survey
    ((${#ACTIVE[@]})) || die "nothing of '$(option name)' runs: use start"
    # The newest is the one that counts: two are there after a replacement that was cut off while it ended the old one.
    old=${ACTIVE[-1]}
    load_fixed "$old"
    load_kept "$old"
    validate_start
    if [[ -n ${OPTION[proxy]-} && $(status_of "$(container_name proxy)") != running ]]; then
        die "the proxy does not run: stop and start"
    fi
    remove_rest
    for container in "${ACTIVE[@]:0:${#ACTIVE[@]}-1}"; do end_old "$container"; done
    slot=$(label_of "$old" slot)
    new=green
    if [[ $slot == green ]]; then new=blue; fi
    if [[ -n ${OPTION[proxy]-} ]]; then set_server "$new" maint || exit "$EXIT_CANNOT"; fi
    prepare "$new"
    bring_up "$new" healthy || {
        code=$?
        error "the old container goes on serving at $(place "$slot" grpc); the new one is removed"
        exit "$code"
    }
    # From here on calls may be under way on the new container: a signal waits until it is one that is kept.
    trap '' INT TERM HUP
    take_in "$new"
    promote "$new"
    exit_on_signals
    overlap
    image=$(inspect "$old" '{{.Image}}')
    end_old "$old"
    if [[ -n $DRY_RUN ]]; then
        [[ -z $FAILED ]] || exit "$EXIT_CANNOT"
        return 0
    fi
    say "to go back: deploy-triton.sh replace --name '$(option name)' --image ${image:0:19}"
    print_usage "$new" "$SERVED"
}

# load_fixed CONTAINER: the addresses are the running container's, whatever else is said now.
load_fixed() {
    local name had
    for name in "${FIXED_OPTIONS[@]}"; do
        had=$(label_of "$1" "option.$name")
        if [[ -n ${OPTION[$name]-} && ${OPTION[$name]} != "${had:-$(option_field "$name" 4)}" ]]; then
            die "--$name cannot change while '$(option name)' runs (it is '${had:-$(option_field "$name" 4)}'):" \
                "stop and start it"
        fi
        OPTION["$name"]=$had
        if [[ -z $had ]]; then unset "OPTION[$name]"; fi
    done
}

# take_in SLOT: behind a proxy, calls go to the new container, too, before it counts.
take_in() {
    [[ -n ${OPTION[proxy]-} ]] || return 0
    set_server "$1" ready || exit "$EXIT_NOT_SERVING"
    if ! wait_taken "$1"; then
        set_server "$1" maint || true
        error "the proxy does not find $(container_name "$1") healthy; the old container goes on serving"
        exit "$EXIT_NOT_SERVING"
    fi
}

# overlap: gives callers who name both containers the time to find the new one.
overlap() {
    local deadline=$((SECONDS + $(option overlap)))
    [[ -z ${OPTION[proxy]-} && -z $DRY_RUN ]] || return 0
    say "both serve; the old one ends in $(option overlap) s (--overlap) …"
    # In short steps: a signal is obeyed at once, and no sleep that outlives this script holds on to its lock.
    while ((SECONDS < deadline)); do sleep "$POLL_S"; done
}

# end_old CONTAINER: ends it, so that its callers turn to the other one.
end_old() {
    local slot
    if [[ -z ${OPTION[proxy]-} ]]; then
        # Triton answers what is under way and refuses what comes now, which the suite's client asks the other one.
        retire "$1"
        return
    fi
    slot=$(label_of "$1" slot)
    set_server "$slot" drain || exit "$EXIT_NOT_SERVING"
    say "waiting until no call is under way on $(container_name "$slot") …"
    wait_drained "$slot" || warn "calls are still under way there after $(option stop-timeout) s"
    retire "$1"
}

# retire CONTAINER: ends and removes it in its own time: Triton answers what is under way.
retire() {
    say "ending $(inspect "$1" '{{.Name}}' | tr -d /) …"
    run_quietly docker stop "$1"
    remove "$1"
}

# -- the others -----------------------------------------------------------------------------------------------------

command_stop() {
    local container found='' kept
    need_engine || exit "$EXIT_CANNOT"
    lock
    # First the proxy: what still comes finds nobody, instead of a server that is ending.
    for container in $(containers proxy) $(containers server); do
        found=$container
        retire "$container"
    done
    remove_network
    if [[ -z $found ]]; then
        say "nothing of '$(option name)' is here"
        return 0
    fi
    kept=$(slug)-artifacts
    if docker volume inspect "$kept" >/dev/null 2>&1; then
        say "kept: the volume $kept ('docker volume rm $kept' removes it)"
    fi
}

command_status() {
    local container newest='' result=0
    need_engine || exit "$EXIT_CANNOT"
    survey
    for container in $(containers server); do newest=$container; done
    if ((${#ACTIVE[@]})); then newest=${ACTIVE[-1]}; fi
    if [[ -z $newest ]]; then
        say "nothing of '$(option name)' is here"
        exit "$EXIT_NOT_SERVING"
    fi
    load_kept "$newest"
    validate_ports
    for container in "${REST[@]}" "${ACTIVE[@]:0:${#ACTIVE[@]}-1}"; do
        [[ $container == "$newest" ]] || print_status "$container" || true
    done
    print_status "$newest" || result=$EXIT_NOT_SERVING
    if [[ -n ${OPTION[proxy]-} ]]; then
        print_proxy_status || result=$EXIT_NOT_SERVING
    fi
    printf 'for callers: %s\n' "$(grpc_addresses)"
    return "$result"
}

command_logs() {
    local container newest='' arguments=(--tail "$(option tail)")
    [[ $(option tail) == all ]] || check_whole tail
    need_engine || exit "$EXIT_CANNOT"
    for container in $(containers server); do newest=$container; done
    [[ -n $newest ]] || die "nothing of '$(option name)' is here"
    [[ -z ${OPTION[follow]-} ]] || arguments+=(--follow)
    exec docker logs "${arguments[@]}" "$newest"
}
