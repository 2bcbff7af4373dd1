# The proxy of --proxy: one address, behind which the containers change.
# shellcheck shell=bash

readonly ADMIN_PORT=9999

# network: its name. Never one that means something to docker, such as host.
network() { printf '%s-network' "$(slug)"; }

# start_network: the network on which the proxy finds the containers by name.
start_network() {
    [[ -n ${OPTION[proxy]-} ]] || return 0
    local owner
    if owner=$(docker network inspect --format "{{index .Labels \"$LABEL.name\"}}" "$(network)" 2>/dev/null); then
        [[ $owner == "$(option name)" ]] && return 0
        die "docker has a network '$(network)' that is not this deployment's: choose another --name"
    fi
    run_quietly docker network create --label "$LABEL.name=$(option name)" "$(network)"
}

get_proxy_image() {
    [[ -n ${OPTION[proxy]-} ]] || return 0
    if image_here "$(option proxy-image)"; then return 0; fi
    say "pulling $(option proxy-image) …"
    run docker pull "$(option proxy-image)" >&"$(result_or_progress)" || {
        error "$(option proxy-image) cannot be pulled: name another HAProxy image with --proxy-image"
        return 1
    }
}

# start_proxy: after the server is ready; returns 1, with the reason said, if calls do not come through.
start_proxy() {
    local http grpc metrics address name url deadline
    name=$(container_name proxy)
    address=$(option bind)
    read -r http grpc metrics <<<"$(ports_of proxy)"
    RUN=()
    guarded proxy "$name"
    RUN+=(--network "$(network)" --env "BLUE=$(container_name blue)" --env "GREEN=$(container_name green)"
        --publish "$(published "$address" "$http" 8000)" --publish "$(published "$address" "$grpc" 8001)"
        --publish "$(published "$address" "$metrics" 8002)"
        --mount "type=bind,$(mount_field source "$DEPLOY_DIR/haproxy.cfg"),target=/etc/triton-vision/haproxy.cfg,readonly"
        "$(option proxy-image)" haproxy -W -db -f /etc/triton-vision/haproxy.cfg)
    start_container || return
    [[ -z $DRY_RUN ]] || return 0
    url=http://$(place proxy http)
    deadline=$((SECONDS + 60))
    until WHY=$(serves "$url"); do
        if [[ $(status_of "$name") != running ]] || ((SECONDS >= deadline)); then
            error "calls do not come through the proxy: $WHY"
            explain "$name"
            return 1
        fi
        sleep "$POLL_S"
    done
}

# admin COMMAND: HAProxy's answer to a command of its runtime interface.
admin() {
    # shellcheck disable=SC2016  # the other shell expands it
    docker exec "$(container_name proxy)" bash -c \
        'exec 3<>"/dev/tcp/127.0.0.1/$1" && printf "%s\n" "$2" >&3 && cat <&3' admin "$ADMIN_PORT" "$1"
}

# set_server SLOT STATE: ready, drain (calls under way end, new ones go elsewhere) or maint. gRPC and metrics follow.
set_server() {
    local answer command="set server http/$1 state $2"
    # Leaving maint, a server counts as up; its health check shall say so first.
    if [[ $2 == ready ]]; then command+="; set server http/$1 health down"; fi
    if [[ -n $DRY_RUN ]]; then
        printf '# the proxy: %s\n' "$command"
        return 0
    fi
    answer=$(admin "$command") || return 1
    [[ -z ${answer//[[:space:]]/} ]] || {
        error "the proxy refuses: $answer"
        return 1
    }
}

# server_stat SLOT COLUMN: a column of HAProxy's statistics, a line for each of gRPC, HTTP and metrics.
server_stat() {
    admin 'show stat' | awk -F, -v slot="$1" -v column="$2" '
        /^# / { sub(/^# /, ""); for (i = 1; i <= NF; i++) at[$i] = i }
        $2 == slot { print $at[column] }'
}

# wait_taken SLOT: until the proxy sends calls there. wait_drained SLOT: until none is under way there any more.
wait_taken() { wait_stat "$1" status 'UP' 30; }
wait_drained() { wait_stat "$1" scur '0' "$(option stop-timeout)"; }

# wait_stat SLOT COLUMN VALUE SECONDS: until the column has the value throughout.
wait_stat() {
    local deadline=$((SECONDS + $4)) found
    [[ -z $DRY_RUN ]] || return 0
    while true; do
        found=$(server_stat "$1" "$2") || found=''
        if [[ -n $found ]] && ! grep -qvx "$3" <<<"$found"; then return 0; fi
        ((SECONDS < deadline)) || return 1
        sleep "$POLL_S"
    done
}
