# What the operator is told: how to call the server, and what runs.
# shellcheck shell=bash

# place SLOT ENDPOINT: HOST:PORT as this machine reaches it.
place() {
    local http grpc metrics
    read -r http grpc metrics <<<"$(ports_of "$1")"
    printf '%s:%s' "$(url_host "$(address_of "$1")")" "${!2}"
}

# grpc_addresses: what callers are given: the proxy's address, or those of both slots.
grpc_addresses() {
    if [[ -n ${OPTION[proxy]-} ]]; then
        place proxy grpc
    else
        printf '%s,%s' "$(place blue grpc)" "$(place green grpc)"
    fi
}

# print_usage SLOT ENSEMBLES: how to call what serves.
print_usage() {
    local front=$1 ensemble=${2%%$'\n'*} addresses
    if [[ -n ${OPTION[proxy]-} ]]; then front=proxy; fi
    addresses=$(grpc_addresses)
    cat <<END
serving: ${2//$'\n'/, }
  gRPC     $(place "$front" grpc)
  HTTP     $(place "$front" http)
  metrics  $(place "$front" metrics)

Call it from Python:
  from triton_vision_client import ImageClient
  with ImageClient($(python_urls "$addresses"), model="$ensemble") as client:
      print(client.classify("photo.jpg").predictions)

or from the shell:
  curl -s http://$(place "$front" http)/v2/models/$ensemble/infer --data-binary @photo.jpg \\
      -H "Content-Type: application/octet-stream" -H "Inference-Header-Content-Length: 0" | tr -dc '[:print:]\\n'
END
    if [[ -z ${OPTION[proxy]-} ]]; then
        printf '\nCallers that name both addresses lose no call when the container is replaced:\n  %s\n' "$addresses"
    fi
    local line
    while IFS= read -r line; do
        warn "$line"
    done < <(docker logs "$(container_name "$1")" 2>/dev/null | grep '^left out: ' || true)
    if [[ $(option bind) != 127.* && $(option bind) != ::1 ]]; then
        warn "whoever reaches $(option bind) may call the server: it asks for no password, and nothing is encrypted"
    fi
}

python_urls() {
    if [[ $1 == *,* ]]; then printf '["%s"]' "${1//,/\", \"}"; else printf '"%s"' "$1"; fi
}

# print_status CONTAINER: one container's lines; returns 1 if it does not serve.
print_status() {
    local slot status health names word result=0
    slot=$(label_of "$1" slot)
    status=$(status_of "$1")
    health=$(health_of "$1")
    if ! promoted "$1"; then
        word='never became ready'
        if [[ $status == running ]]; then word='not ready yet'; fi
        result=1
    elif [[ $status != running ]]; then
        word="$status, exit code $(inspect "$1" '{{.State.ExitCode}}')"
        result=1
    elif names=$(serves "$(base_url "$slot")"); then
        word="serving ${names//$'\n'/, }"
        if [[ $health == unhealthy ]]; then
            word+=", but docker says unhealthy: $(last_health "$1")"
            result=1
        fi
    else
        word="not serving: $names"
        result=1
    fi
    cat <<END
$(inspect "$1" '{{.Name}}' | tr -d /)  $word
  image    $(inspect "$1" '{{.Config.Image}}') ($(inspect "$1" '{{.Image}}' | cut -c 8-19)), started $(inspect "$1" '{{.State.StartedAt}}' | cut -c 1-19)Z, restarts $(inspect "$1" '{{.RestartCount}}'), health $health
  gRPC     $(place "$slot" grpc)
  HTTP     $(place "$slot" http)
  metrics  $(place "$slot" metrics)
END
    return "$result"
}

# print_proxy_status: the proxy's line; returns 1 if calls do not come through it.
print_proxy_status() {
    local name status names
    name=$(container_name proxy)
    status=$(status_of "$name")
    if [[ $status != running ]]; then
        printf '%s  %s\n' "$name" "${status:-missing}"
        return 1
    fi
    if ! names=$(serves "http://$(place proxy http)"); then
        printf '%s  running, but calls do not come through: %s\n' "$name" "$names"
        return 1
    fi
    printf '%s  passing calls on\n' "$name"
}
