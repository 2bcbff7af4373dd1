# Waiting until a container serves, and what is said of one that never does.
# shellcheck shell=bash

readonly POLL_S=0.5 CALL_S=30 LOG_LINES=40
# How the suite refuses an image (triton_vision.probe).
readonly REFUSAL="^\{\"error\": ?\"(in ensemble '[^']+', )*image [0-9]+: [A-Za-z0-9_-]+:"
readonly TAKES_A_PHOTO='"inputs":[{"name":"IMAGE","datatype":"BYTES","shape":[-1,1]}]'
# So many answers in a row that are no answers make a server that will not serve.
readonly BAD_ANSWERS=3

# ask URL [CURL ARGUMENT…]: the body on stdout; returns 1 unless the answer is 200.
ask() {
    local url=$1
    shift
    curl --silent --show-error --fail --noproxy '*' --connect-timeout 5 --max-time "$CALL_S" "$@" -- "$url" 2>&1
}

# base_url SLOT: of a container's HTTP port, as this machine reaches it.
base_url() {
    local http
    read -r http _ <<<"$(ports_of "$1")"
    printf 'http://%s:%s' "$(url_host "$(address_of "$1")")" "$http"
}

# ensembles URL: the ensembles that the server has, one a line. Of a server that does not tell its models (serve's
# --admin-apis), those of the suite that it has.
ensembles() {
    local model found=''
    for model in $(ask "$1/v2/models/stats" | grep -o '"name":"[^"]*","version"' | cut -d '"' -f 4 | sort -u); do
        if ask "$1/v2/models/$model" | grep -q '"platform":"ensemble"'; then found+=$model$'\n'; fi
    done
    if [[ -z $found ]]; then
        for model in ensemble ensemble_lite; do
            if ask "$1/v2/models/$model/ready" >/dev/null; then found+=$model$'\n'; fi
        done
    fi
    printf '%s' "$found"
}

# photo_for ENSEMBLE: the file to send to it: probe.jpg beside its configuration, where the repository is on this machine.
photo_for() {
    local own=${OPTION[repository]-}/$1/probe.jpg
    if [[ -n ${OPTION[repository]-} && -r $own ]]; then printf '%s' "$own"; else printf '%s' "$DEPLOY_DIR/probe.jpg"; fi
}

# call URL ENSEMBLE: whether it is ready and, where it takes images, answers one. Says why not. An image that is refused
# has been answered, and a queue full of other callers' work says nothing against the server.
call() {
    local answer code metadata
    ask "$1/v2/models/$2/ready" >/dev/null || {
        echo "the model $2 is not ready"
        return 1
    }
    if metadata=$(ask "$1/v2/models/$2") && [[ $metadata != *"$TAKES_A_PHOTO"*'"name":"STATUS"'* ]]; then
        return 0
    fi
    # Without --fail: the body of a refusal says why.
    answer=$(curl --silent --show-error --noproxy '*' --max-time "$CALL_S" --data-binary "@$(photo_for "$2")" \
        --header 'Content-Type: application/octet-stream' --header 'Inference-Header-Content-Length: 0' \
        --write-out ' (HTTP %{http_code})' -- "$1/v2/models/$2/infer" 2>&1 | tr -dc '[:print:]') || true
    code=${answer##*(HTTP }
    case ${code%)} in
    200) return 0 ;;
    401 | 403) return 0 ;;
    400) if [[ $answer =~ $REFUSAL ]]; then return 0; fi ;;
    503) if [[ $answer == *'Exceeds maximum queue size'* || $answer == *'timeout expired'* ]]; then return 0; fi ;;
    esac
    echo "$2 does not answer an image: ${answer:0:300}"
    return 1
}

# serves URL: whether every ensemble that must answer does; prints why not. Returns 1 if that may pass, 2 if it will not.
serves() {
    local url=$1 names name why
    ask "$url/v2/health/ready" >/dev/null || {
        echo "it does not say that it is ready"
        return 1
    }
    names=$(ensembles "$url")
    if [[ -n ${OPTION[ensemble]-} ]]; then
        # Triton opens its ports when all models are loaded: what is not there then does not come any more.
        ask "$url/v2/models/${OPTION[ensemble]}/ready" >/dev/null || {
            echo "it does not serve the ensemble ${OPTION[ensemble]}, only: ${names//$'\n'/, }"
            return 2
        }
        names=${OPTION[ensemble]}
    fi
    [[ -n $names ]] || {
        echo "it serves no ensemble"
        return 2
    }
    for name in $names; do
        why=$(call "$url" "$name") || {
            echo "$why"
            return 3
        }
    done
    printf '%s\n' "$names"
}

# wait_ready SLOT [healthy]: waits until the container serves and, with the second argument, until docker says so, too.
# Sets SERVED to the ensembles; returns 1 and sets WHY if it does not come to that.
wait_ready() {
    local container url deadline health code bad=0 seconds answered=''
    container=$(container_name "$1")
    url=$(base_url "$1")
    seconds=$(option timeout)
    deadline=$((SECONDS + seconds))
    while true; do
        health=$(health_of "$container")
        case $(status_of "$container") in
        running) ;;
        '') WHY='it has been removed by somebody else' && return 1 ;;
        *) WHY="it ended with exit code $(inspect "$container" '{{.State.ExitCode}}')$(out_of_memory "$container")" && return 1 ;;
        esac
        if [[ $health == unhealthy ]]; then
            WHY="docker's health check says unhealthy: $(last_health "$container")"
            return 1
        fi
        if [[ -z $answered ]]; then
            code=0
            WHY=$(serves "$url") || code=$?
            case $code in
            0) answered=yes && SERVED=$WHY ;;
            1) bad=0 ;;
            2) return 1 ;;
            *) bad=$((bad + 1)) ;;
            esac
            ((bad < BAD_ANSWERS)) || return 1
        fi
        if [[ -n $answered && (${2-} != healthy || $health == healthy || $health == none) ]]; then return 0; fi
        [[ -z $answered ]] || WHY="it answers, but docker's health check still says $health"
        if ((SECONDS >= deadline)); then
            WHY="it was not ready within $seconds s (--timeout): $WHY"
            return 1
        fi
        sleep "$POLL_S"
    done
}

out_of_memory() {
    if [[ $(inspect "$1" '{{.State.OOMKilled}}') == true ]]; then printf ' because it ran out of memory'; fi
}

last_health() {
    inspect "$1" '{{if .State.Health}}{{range .State.Health.Log}}{{println .Output}}{{end}}{{end}}' |
        grep -v '^[[:space:]]*$' | tail -n 1 | cut -c 1-300 || true
}

# explain CONTAINER: its last lines, and what to do.
explain() {
    local lines
    lines=$(docker logs --tail "$LOG_LINES" "$1" 2>&1) || true
    {
        printf -- '---- the last lines of %s\n' "$1"
        printf '%s\n----\n' "$lines"
    } >&2
    say "what to do: $(remedy "$1" "$lines")"
}

remedy() {
    case $2 in
    *"left out"*) echo "give the models that were left out their artifacts (the lines above say which), or another --ensemble" ;;
    *"Permission denied"* | *"Read-only file system"*)
        echo "see that what is mounted can be read, and --artifacts written, by user $(inspect "$1" '{{.Config.User}}') of the container"
        ;;
    *"No space left"*) echo "make room on the disk, or give more --shm-size" ;;
    *)
        if [[ $(inspect "$1" '{{.State.OOMKilled}}') == true ]]; then
            echo "give the container more memory, or the repository fewer instances"
        else
            echo "the lines above say what the server met; for more of them add -- --log-level info"
        fi
        ;;
    esac
}
