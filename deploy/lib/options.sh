# The options: one table, from which the command line, the environment, the environment file and the help come.
# shellcheck shell=bash

# NAME|COMMANDS|ARGUMENT|DEFAULT|MEANING. COMMANDS by first letter: start, replace, stOp, statUs, Logs. An option
# without an ARGUMENT is a flag. In the environment it is TRITON_VISION_NAME, with _ for -.
readonly OPTION_TABLE="\
name|sroul|NAME|triton-vision|the deployment; several run side by side under different names and ports
image|sr|REF|triton-vision:latest|the image
build|sr|||build the image first, from Dockerfile.triton in this checkout
build-option|sr|OPTION||of docker build, such as --build-arg=WEIGHTS=random; may be repeated
pull|sr|||pull the image first; by default only one that is not here is pulled
repository|sr|DIR||a model repository, mounted read-only over the image's own
artifacts|sr|DIR or VOLUME|NAME-artifacts|where the server keeps what it makes, mounted writable at /artifacts
bind|sr|ADDRESS|127.0.0.1|the address of this machine to listen on; 0.0.0.0 is all of them
http-port|sr|N|8000|HTTP
grpc-port|sr|N|8001|gRPC
metrics-port|sr|N|8002|metrics
port-step|sr|N|10|how far the second container's ports are from the first's
proxy|sr|||one address in front of both containers, for callers that cannot name two
proxy-image|sr|REF|haproxy:lts|the HAProxy image of --proxy
gpus|sr|all, none or LIST|what is there|GPUs by index or UUID, such as 0,1
min-driver|sr|VERSION|by the image's CUDA|the oldest NVIDIA driver that is accepted; 0 is any
min-disk|sr|GB|30 to pull or build, else 2|free disk that is asked for; 0 is none
shm-size|sr|SIZE|1g|the limit of the container's shared memory
user|sr|UID[:GID]|the image's|whom the server runs as
config-name|sr|NAME|for this machine|the core variant, configs/NAME.pbtxt in a model's directory
ensemble|sr|NAME|every one served|the ensemble that must answer before the start counts
timeout|sr|SECONDS|600|how long the server may take to become ready
overlap|r|SECONDS|10|how long both containers serve before the old one is ended
stop-timeout|sr|SECONDS|30|how long the server may take to end before it is killed
container-env-file|sr|FILE||variables for the container, as docker run --env-file reads them
docker-option|sr|OPTION||of docker run, such as --memory=16g; may be repeated
env-file|sroul|FILE||these options as lines TRITON_VISION_NAME=value
follow|l|||go on printing
tail|l|N|100|how many lines to begin with
dry-run|sro|||print the commands and change nothing
"
# Those that may be given several times; their values are kept one a line.
readonly LIST_OPTIONS=' build-option docker-option '
# What a deployment keeps for its life: callers know the addresses.
readonly FIXED_OPTIONS=(bind http-port grpc-port metrics-port port-step proxy)
# What replace takes from the running container where nothing else says it.
readonly KEPT_OPTIONS=(image repository artifacts bind http-port grpc-port metrics-port port-step proxy proxy-image
    gpus min-driver min-disk shm-size user config-name ensemble timeout stop-timeout container-env-file docker-option
    serve-arguments)

declare -A OPTION=() GIVEN=()
SERVE_ARGUMENTS=()
HELP=''

# option_field NAME FIELD: a field of the table; FIELD 2 to 5. Returns 1 if there is no such option.
option_field() {
    local name commands argument default meaning
    while IFS='|' read -r name commands argument default meaning; do
        if [[ $name == "$1" ]]; then
            local fields=("$name" "$commands" "$argument" "$default" "$meaning")
            printf '%s' "${fields[$2 - 1]}"
            return 0
        fi
    done <<<"$OPTION_TABLE"
    return 1
}

command_letter() {
    case $1 in stop) echo o ;; status) echo u ;; logs) echo l ;; *) echo "${1:0:1}" ;; esac
}

variable_of() {
    local upper=${1^^}
    printf 'TRITON_VISION_%s' "${upper//-/_}"
}

# parse_command_line COMMAND ARGUMENT…: fills GIVEN and SERVE_ARGUMENTS.
parse_command_line() {
    local command=$1 letter argument name value commands
    letter=$(command_letter "$command")
    shift
    while (($#)); do
        argument=$1
        shift
        case $argument in
        -h | --help)
            HELP=yes
            continue
            ;;
        --)
            [[ $letter == [sr] ]] || die "$command takes no arguments after --"
            SERVE_ARGUMENTS=("$@")
            GIVEN[serve-arguments]=$(join_lines "$@")
            break
            ;;
        --*) ;;
        *) die "unexpected argument '$argument': see deploy-triton.sh $command --help" ;;
        esac
        name=${argument#--}
        name=${name%%=*}
        if ! commands=$(option_field "$name" 2) || [[ $commands != *"$letter"* ]]; then
            die "$command has no option --$name: see deploy-triton.sh $command --help"
        fi
        if [[ -z $(option_field "$name" 3) ]]; then
            [[ $argument != *=* ]] || die "--$name takes no value"
            value=yes
        elif [[ $argument == *=* ]]; then
            value=${argument#*=}
        else
            (($#)) || die "--$name needs a value: $(option_field "$name" 3)"
            value=$1
            shift
        fi
        give "$name" "$value" "--$name"
    done
}

# give NAME VALUE ORIGIN: notes what the command line says.
give() {
    [[ $2 != *$'\n'* ]] || die "$3 has a value of several lines"
    if [[ $LIST_OPTIONS == *" $1 "* && -n ${GIVEN[$1]+given} ]]; then
        GIVEN[$1]+=$'\n'$2
    else
        GIVEN[$1]=$2
    fi
}

join_lines() {
    local argument
    for argument in "$@"; do
        [[ $argument != *$'\n'* ]] || die "an argument after -- has several lines"
    done
    local IFS=$'\n'
    printf '%s' "$*"
}

# read_settings COMMAND: fills OPTION from the command line, else the environment, else the environment file. What is
# in none of them stays unset, so that replace can take it from the running container.
read_settings() {
    local letter name commands rest variable file
    letter=$(command_letter "$1")
    file=${GIVEN[env-file]-${TRITON_VISION_ENV_FILE-}}
    if [[ -n $file ]]; then read_env_file "$file"; fi
    while IFS='|' read -r name commands rest; do
        [[ $commands == *"$letter"* && $name != env-file ]] || continue
        variable=$(variable_of "$name")
        if [[ -z ${GIVEN[$name]+given} && -n ${!variable-} ]]; then
            OPTION[$name]=$(from_variable "$name" "${!variable}" "$variable")
        fi
    done < <(printf '%s' "$OPTION_TABLE")
    for name in "${!GIVEN[@]}"; do OPTION[$name]=${GIVEN[$name]}; done
    [[ -z ${OPTION[dry-run]-} ]] || DRY_RUN=yes
    validate_name
}

# from_variable NAME VALUE ORIGIN: the value of an option as a variable gives it; flags are words there.
from_variable() {
    if [[ -n $(option_field "$1" 3) ]]; then
        printf '%s' "$2"
        return
    fi
    case ${2,,} in
    1 | yes | true | on) printf yes ;;
    0 | no | false | off) ;;
    *) die "$3 is '$2': say yes or no" ;;
    esac
}

# read_env_file FILE: lines TRITON_VISION_NAME=value. They are read, never executed: no quotes, no expansion.
read_env_file() {
    local file=$1 line key name number=0
    [[ -f $file && -r $file ]] || die "there is no readable environment file '$file'"
    while IFS= read -r line || [[ -n $line ]]; do
        number=$((number + 1))
        line=${line%$'\r'}
        [[ $line =~ ^[[:space:]]*(#|$) ]] && continue
        key=${line%%=*}
        name=${key#TRITON_VISION_}
        name=${name,,}
        name=${name//_/-}
        if [[ $line != *=* || $key != TRITON_VISION_* || $name == env-file ]] || ! option_field "$name" 2 >/dev/null; then
            die "$file, line $number: '$key' is not a setting of this script: write TRITON_VISION_NAME=value, one a line" \
                "(variables for the container go into --container-env-file)"
        fi
        line=${line#*=}
        if [[ $line =~ ^[\"\'] ]]; then
            die "$file, line $number: write the value of $key without quotes"
        fi
        [[ -n $line ]] || continue
        if [[ $LIST_OPTIONS == *" $name "* && -n ${OPTION[$name]-} ]]; then
            OPTION[$name]+=$'\n'$line
        else
            OPTION[$name]=$(from_variable "$name" "$line" "$file, line $number: $key")
        fi
    done <"$file"
}

# option NAME: its value, or its default where that is a fixed one.
option() {
    if [[ -n ${OPTION[$1]+set} ]]; then
        printf '%s' "${OPTION[$1]}"
        return
    fi
    case $1 in
    name | image | bind | http-port | grpc-port | metrics-port | port-step | proxy-image | shm-size | timeout | overlap | stop-timeout | tail)
        option_field "$1" 4
        ;;
    esac
}

print_help() {
    cat <<'END'
usage: deploy-triton.sh start|replace|status|logs|stop [OPTION…] [-- ARGUMENT OF triton-vision serve…]

  start    check the machine, get the image, start it, wait until it answers an image
  replace  start a new container beside the running one, wait, switch, end the old one: no call fails
  status   what runs, where, and whether it answers
  logs     what the server printed
  stop     end it; what it made is kept

deploy-triton.sh COMMAND --help lists the options. Exit codes: 0 done; 1 the server is not serving; 2 it could not be
done (a wrong option, a check that failed, no engine, another deploy-triton.sh at work).
END
}

# print_command_help COMMAND
print_command_help() {
    local letter name commands argument default meaning left
    letter=$(command_letter "$1")
    printf 'usage: deploy-triton.sh %s [OPTION…]%s\n\n' "$1" "$([[ $letter == [sr] ]] && echo ' [-- ARGUMENT…]')"
    while IFS='|' read -r name commands argument default meaning; do
        [[ $commands == *"$letter"* ]] || continue
        left="--$name${argument:+ $argument}"
        [[ -z $default ]] || meaning+=" (default: $default)"
        if ((${#left} > 30)); then
            printf '  %s\n  %-30s  %s\n' "$left" '' "$meaning"
        else
            printf '  %-30s  %s\n' "$left" "$meaning"
        fi
    done < <(printf '%s' "$OPTION_TABLE")
    printf '\nEach option is also a variable, TRITON_VISION_NAME with _ for -, of the environment or of --env-file.\n'
    if [[ $letter == r ]]; then
        printf 'What is not said keeps the value that the running container was started with.\n'
    fi
}
