# Whether this machine can do what is asked: every check says what is wrong and what to do about it.
# shellcheck shell=bash

# The oldest driver that runs programs of a CUDA major version (NVIDIA's table of minor version compatibility).
declare -rA DRIVER_OF_CUDA=([11]=450.80.02 [12]=525.60.13 [13]=580.65.06)

GPUS='' # what is given to docker: all, none, or a list
DRIVER='' # the driver's version, where GPUs are used

# check_machine SLOT…: all checks, so that one run tells everything; ports are those of the slots that are to be
# started. Returns 1 if any failed.
check_machine() {
    local failed='' slot
    check_tools || failed=yes
    check_gpus || failed=yes
    check_disk || failed=yes
    for slot in "$@"; do check_ports "$slot" || failed=yes; done
    [[ -z $failed ]]
}

check_tools() {
    command -v curl >/dev/null || {
        error "there is no curl here, with which the server is asked whether it is ready: install curl"
        return 1
    }
}

# -- GPUs -----------------------------------------------------------------------------------------------------------

# check_gpus: sets GPUS from --gpus, or from what is there.
check_gpus() {
    local wanted=${OPTION[gpus]-} listing why
    GPUS=${wanted:-none}
    [[ $wanted != none ]] || return 0
    if ! command -v nvidia-smi >/dev/null; then
        no_gpu "$wanted" "there is no NVIDIA driver here (no nvidia-smi)" "install the driver"
        return
    fi
    # A line for each GPU: INDEX, UUID, DRIVER.
    if ! listing=$(timeout 30 nvidia-smi --query-gpu=index,uuid,driver_version --format=csv,noheader 2>&1); then
        why=${listing%%$'\n'*}
        no_gpu "$wanted" "nvidia-smi finds no GPU: ${why:-it did not answer}" "mend the driver"
        return
    fi
    if [[ $listing != *,*,* ]]; then
        no_gpu "$wanted" "the NVIDIA driver sees no GPU" "plug one in, or pass it through to this machine"
        return
    fi
    if ! has_toolkit; then
        no_gpu "$wanted" "docker cannot pass GPUs on: the NVIDIA Container Toolkit is not set up" \
            "install nvidia-container-toolkit, run 'nvidia-ctk runtime configure --runtime=docker', restart docker"
        return
    fi
    DRIVER=${listing%%$'\n'*}
    DRIVER=${DRIVER##*, }
    if [[ -z $wanted ]]; then
        GPUS=all
    elif [[ $wanted != all ]]; then
        check_gpu_names "$listing" "$wanted"
    fi
}

# no_gpu WANTED WHAT REMEDY: an error where a GPU was asked for, else a word about it.
no_gpu() {
    if [[ -n $1 ]]; then
        error "--gpus $1: $2: $3, or say --gpus none"
        return 1
    fi
    say "no GPU: $2; the server runs on the CPU"
}

has_toolkit() {
    [[ " $ENGINE_RUNTIMES" == *" nvidia "* ]] || command -v nvidia-container-runtime-hook >/dev/null
}

check_gpu_names() {
    local name count
    count=$(wc -l <<<"$1")
    for name in ${2//,/ }; do
        # MIG instances and shortened UUIDs are docker's to judge.
        if [[ $name =~ ^[0-9]+$ ]] && ! grep -q "^$name," <<<"$1"; then
            error "--gpus $2: there is no GPU $name: this machine has $count, numbered from 0"
            return 1
        elif [[ $name == GPU-* && $1 != *"$name"* ]]; then
            error "--gpus $2: there is no GPU $name: see nvidia-smi -L"
            return 1
        fi
    done
}

# check_driver: whether the driver is new enough for the CUDA that the image says it has; once the image is here.
check_driver() {
    local least=${OPTION[min-driver]-} variables cuda=''
    [[ -n $DRIVER ]] || return 0
    if [[ -z $least ]]; then
        variables=$(image_field "$(option image)" '{{range .Config.Env}}{{println .}}{{end}}')
        cuda=$(sed -n 's/^CUDA_VERSION=\([0-9]*\).*/\1/p' <<<"$variables")
        least=${DRIVER_OF_CUDA[${cuda:-0}]-0}
        [[ $least != 0 ]] || say "the image does not say which NVIDIA driver it needs; here is $DRIVER"
    fi
    older_or_equal "$least" "$DRIVER" || {
        error "the NVIDIA driver is $DRIVER, older than $least, which ${cuda:+CUDA $cuda in the image needs}$([[ $cuda ]] ||
            echo '--min-driver asks for'): update it, or say --min-driver 0 where NVIDIA's forward compatibility covers it"
        return 1
    }
}

# -- disk -----------------------------------------------------------------------------------------------------------

check_disk() {
    local wanted folder=$ENGINE_ROOT free
    wanted=${OPTION[min-disk]-}
    if [[ -z $wanted ]]; then
        wanted=2
        if must_fetch; then wanted=30; fi
    fi
    while [[ -n $folder && $folder != / && ! -e $folder ]]; do folder=$(dirname -- "$folder"); done
    free=$(df --output=avail --block-size=1G -- "${folder:-/}" | tail -n 1 | tr -d ' ')
    ((free >= wanted)) || {
        error "$free GB are free in ${ENGINE_ROOT:-/}, where docker keeps images, and $wanted are asked for:" \
            "make room ('docker system df' shows what uses it), or say --min-disk"
        return 1
    }
}

# must_fetch: whether the image has to be pulled or built.
must_fetch() { [[ -n ${OPTION[build]-} || -n ${OPTION[pull]-} ]] || ! image_here "$(option image)"; }

# -- ports ----------------------------------------------------------------------------------------------------------

check_ports() {
    local address port failed='' holder
    address=$(address_of "$1")
    check_own_address "$address" || return 1
    for port in $(ports_of "$1"); do
        if holder=$(port_holder "$address" "$port"); then
            error "port $port of $address is taken by $holder: end that, or choose other ports (--http-port," \
                "--grpc-port, --metrics-port, --port-step)"
            failed=yes
        fi
    done
    [[ -z $failed ]]
}

# check_own_address ADDRESS: docker's own message for a foreign one is cryptic.
check_own_address() {
    [[ $1 != 0.0.0.0 && $1 != :: && $1 != 127.* ]] || return 0
    command -v ip >/dev/null || return 0
    [[ -n $(ip -oneline address show to "$1" 2>/dev/null) ]] || {
        error "--bind $1 is not an address of this machine: see 'ip address'"
        return 1
    }
}

# port_holder ADDRESS PORT: prints who listens there; returns 1 if nobody does.
port_holder() {
    local lines line container process
    command -v ss >/dev/null || {
        port_answers "$1" "$2" || return 1
        printf 'a program'
        return
    }
    lines=$(ss --no-header --listening --tcp --numeric --processes "sport = :$2")
    while read -r line; do
        conflicts "$1" "$(awk '{print $4}' <<<"$line")" || continue
        container=$(docker ps --filter "publish=$2" --format '{{.Names}}' 2>/dev/null | head -n 1)
        if [[ -n $container ]]; then
            printf 'the container %s' "$container"
        elif process=$(sed -n 's/.*users:(("\([^"]*\)",pid=\([0-9]*\).*/\1, process \2/p' <<<"$line") && [[ -n $process ]]; then
            printf '%s' "$process"
        else
            printf "another user's program (sudo ss -ltnp names it)"
        fi
        return 0
    done < <(printf '%s' "${lines:+$lines$'\n'}")
    return 1
}

# conflicts ADDRESS LISTENER: whether a listener such as 0.0.0.0:80, [::]:80 or *:80 excludes one on the address.
conflicts() {
    local host=${2%:*}
    host=${host#[}
    host=${host%]}
    host=${host%\%*}
    host=${host#::ffff:} # IPv4 of a program that listens by IPv6, such as Triton's gRPC
    [[ $host == '*' || $host == "$1" ]] || [[ $1 != *:* && $host == 0.0.0.0 ]] || [[ $host == :: && $1 == *:* ]] ||
        [[ $1 == 0.0.0.0 && $host != *:* ]] || [[ $1 == :: ]]
}

port_answers() { (exec 3<>"/dev/tcp/$(url_host "$1" | tr -d '[]')/$2") 2>/dev/null; }
