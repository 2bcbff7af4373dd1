#!/usr/bin/env bash
#
# Runs the suite's image with Docker: start, stop, status, logs, and replace, which swaps the running container for a
# new one without a failed call. Commands, options and exit codes: --help, and docs/deploy.md.

if ((BASH_VERSINFO[0] < 4 || (BASH_VERSINFO[0] == 4 && BASH_VERSINFO[1] < 4))); then
    echo "error: this needs bash 4.4 or newer and this is $BASH_VERSION" >&2
    exit 2
fi
set -Eeuo pipefail
export LC_ALL=C # what other programs print is read below

DEPLOY_DIR=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
readonly DEPLOY_DIR

# shellcheck source=lib/messages.sh
source "$DEPLOY_DIR/lib/messages.sh"
# shellcheck source=lib/options.sh
source "$DEPLOY_DIR/lib/options.sh"
# shellcheck source=lib/validate.sh
source "$DEPLOY_DIR/lib/validate.sh"
# shellcheck source=lib/engine.sh
source "$DEPLOY_DIR/lib/engine.sh"
# shellcheck source=lib/checks.sh
source "$DEPLOY_DIR/lib/checks.sh"
# shellcheck source=lib/container.sh
source "$DEPLOY_DIR/lib/container.sh"
# shellcheck source=lib/ready.sh
source "$DEPLOY_DIR/lib/ready.sh"
# shellcheck source=lib/proxy.sh
source "$DEPLOY_DIR/lib/proxy.sh"
# shellcheck source=lib/report.sh
source "$DEPLOY_DIR/lib/report.sh"
# shellcheck source=lib/commands.sh
source "$DEPLOY_DIR/lib/commands.sh"

main() {
    local command=${1-}
    case $command in
    start | stop | status | logs | replace) shift ;;
    -h | --help | help)
        print_help
        return 0
        ;;
    '')
        print_help >&2
        return 2
        ;;
    *) die "there is no command '$command': use start, stop, status, logs or replace" ;;
    esac
    parse_command_line "$command" "$@"
    if [[ -n $HELP ]]; then
        print_command_help "$command"
        return 0
    fi
    read_settings "$command"
    "command_$command"
}

main "$@"
