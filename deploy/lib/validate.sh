# What can be judged of the options without looking at the machine's engine.
# shellcheck shell=bash

declare -A PORT=() # http, grpc, metrics: the deployment's first ports

validate_name() {
    local name
    name=$(option name)
    if [[ -z $name || ${#name} -gt 40 || $name == *[[:cntrl:]]* ]]; then
        die "--name must be 1 to 40 characters in one line"
    fi
}

# validate_start: the options of start and replace, once all that is to be known of them is in OPTION.
validate_start() {
    local name endpoint
    for name in timeout overlap stop-timeout min-disk; do check_whole "$name"; done
    (($(option timeout) > 0)) || die "--timeout must be above 0 seconds"
    [[ $(option image) =~ ^[A-Za-z0-9][A-Za-z0-9_./:@-]*$ ]] || die "--image '$(option image)' is not an image reference"
    [[ $(option shm-size) =~ ^[1-9][0-9]*[bkmgBKMG]?$ ]] ||
        die "--shm-size '$(option shm-size)' is not a size: write a number and b, k, m or g, such as 1g"
    [[ ${OPTION[min-driver]-0} =~ ^[0-9]+(\.[0-9]+)*$ ]] || die "--min-driver '${OPTION[min-driver]}' is not a version"
    [[ ${OPTION[user]-0} =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?$ ]] ||
        die "--user '${OPTION[user]}' is no UID, UID:GID or name"
    [[ ${OPTION[config-name]-a} =~ ^[A-Za-z0-9_.-]+$ ]] ||
        die "--config-name '${OPTION[config-name]}' is not a name: give configs/NAME.pbtxt's NAME"
    [[ ${OPTION[ensemble]-a} =~ ^[A-Za-z0-9_.:-]+$ ]] || die "--ensemble '${OPTION[ensemble]}' is not a model's name"
    [[ ${OPTION[gpus]-all} =~ ^(all|none|[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*)$ ]] ||
        die "--gpus '${OPTION[gpus]}': say all, none, or indices or UUIDs with commas between, such as 0,1"
    check_address "$(option bind)"
    validate_ports
    for endpoint in repository artifacts container-env-file; do check_path "$endpoint"; done
    validate_serve_arguments
}

# This script, and the proxy, ask the container over plain HTTP whether it is ready.
validate_serve_arguments() {
    local argument
    while IFS= read -r argument; do
        case $argument in
        --tls-* | --inference-token-file* | --no-http* | --host* | --http-port* | --grpc-port* | --metrics-port*)
            die "$argument cannot be given here: run the image yourself for that, as docs/image.md and docs/security.md say"
            ;;
        esac
    done <<<"${OPTION[serve-arguments]-}"
    if [[ -n ${OPTION[container-env-file]-} ]] &&
        grep -qE '^TRITON_VISION_(INFERENCE_TOKEN|TLS)' -- "${OPTION[container-env-file]}"; then
        die "--container-env-file sets an inference token: run the image yourself for that, as docs/security.md says"
    fi
}

check_whole() {
    local value
    value=$(option "$1")
    [[ -z $value || $value =~ ^[0-9]{1,6}$ ]] || die "--$1 '$value' is not a whole number"
}

check_address() {
    if [[ $1 =~ ^[0-9]{1,3}(\.[0-9]{1,3}){3}$ ]]; then
        local part
        for part in ${1//./ }; do ((10#$part < 256)) || die "--bind '$1' is no IP address"; done
    elif [[ $1 != *:* || ! $1 =~ ^[0-9A-Fa-f:.]+$ ]]; then
        die "--bind '$1' is no IP address: give 127.0.0.1, 0.0.0.0, or an address of this machine"
    fi
}

# validate_ports: fills PORT. All ports that the deployment may ever use must differ, or a replacement would fail later.
validate_ports() {
    local endpoint name value set step seen=' '
    for name in http-port grpc-port metrics-port port-step; do
        value=$(option "$name")
        [[ $value =~ ^[1-9][0-9]{0,4}$ ]] || die "--$name '$value' is not a number from 1 to 65535"
    done
    step=$(option port-step)
    for endpoint in http grpc metrics; do
        PORT[$endpoint]=$(option "$endpoint-port")
        for set in 0 1 2; do
            [[ $set -lt 2 || -n ${OPTION[proxy]-} ]] || continue
            value=$((PORT[$endpoint] + set * step))
            ((value <= 65535)) || die "port $value, the $endpoint port plus --port-step, is above 65535"
            [[ $seen != *" $value "* ]] ||
                die "two endpoints would use port $value: choose other ports, or another --port-step (a replacement" \
                    "takes the ports $step further up)"
            seen+="$value "
        done
    done
}

# check_path OPTION: makes a path absolute; what is named must be there.
check_path() {
    local value=${OPTION[$1]-}
    [[ -n $value ]] || return 0
    case $1 in
    repository)
        [[ -d $value ]] || die "--repository: there is no directory '$value'"
        has_models "$value" || die "--repository: '$value' holds no model directory (NAME/config.pbtxt)"
        ;;
    artifacts)
        # As docker has it: what has no slash is a volume's name.
        if [[ $value != */* ]]; then
            [[ $value =~ ^[A-Za-z0-9][A-Za-z0-9_.-]+$ ]] ||
                die "--artifacts '$value' is not a volume's name; a directory is written with a slash, ./$value"
            return 0
        fi
        [[ -d $value ]] || die "--artifacts: there is no directory '$value': make it, writable for the server's user"
        ;;
    container-env-file)
        [[ -f $value && -r $value ]] || die "--container-env-file: there is no readable file '$value'"
        ;;
    esac
    OPTION[$1]=$(readlink -f -- "$value")
}

has_models() {
    local config
    for config in "$1"/*/config.pbtxt; do
        if [[ -e $config ]]; then return 0; fi
    done
    return 1
}

# ports_of SLOT: "HTTP GRPC METRICS" of a container. blue has the first ports, green the second; behind a proxy, which
# has the first ports itself, they have the second and the third.
ports_of() {
    local step set=0
    step=$(option port-step)
    if [[ $1 == green ]]; then set=1; fi
    if [[ -n ${OPTION[proxy]-} && $1 != proxy ]]; then set=$((set + 1)); fi
    printf '%d %d %d' $((PORT[http] + set * step)) $((PORT[grpc] + set * step)) $((PORT[metrics] + set * step))
}

# address_of SLOT: the address that its ports are published on. Behind a proxy only this machine sees the containers.
address_of() {
    if [[ -n ${OPTION[proxy]-} && $1 != proxy ]]; then
        printf '127.0.0.1'
    else
        option bind
    fi
}

# url_host ADDRESS: the host part under which this machine reaches what listens there.
url_host() {
    case $1 in
    0.0.0.0) printf '127.0.0.1' ;;
    ::) printf '[::1]' ;;
    *:*) printf '[%s]' "$1" ;;
    *) printf '%s' "$1" ;;
    esac
}
