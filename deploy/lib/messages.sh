# Messages, exit codes, and running or printing a command.
# shellcheck shell=bash

# 0: done. 1: it was done and the server is not (or no longer) what was asked for. 2: it could not be done.
readonly EXIT_NOT_SERVING=1 EXIT_CANNOT=2

DRY_RUN=''

# Progress goes to stderr; stdout carries results alone, so that they can be piped.
say() { printf '%s\n' "$*" >&2; }

warn() { printf 'warning: %s\n' "$*" >&2; }

# error MESSAGE: for a caller that goes on to clean up.
error() { printf 'error: %s\n' "$*" >&2; }

die() {
    error "$*"
    exit "$EXIT_CANNOT"
}

# run COMMAND ARGUMENT…: what changes something. A dry run prints it, quoted so that a shell would run it as it stands.
run() {
    if [[ -n $DRY_RUN ]]; then
        print_command "$@"
    else
        "$@"
    fi
}

# run_quietly COMMAND ARGUMENT…: the same without the ids and names that docker prints.
run_quietly() {
    if [[ -n $DRY_RUN ]]; then
        print_command "$@"
    else
        "$@" >/dev/null
    fi
}

print_command() {
    local word line='' quoted
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
            quoted=$word
        else
            quoted="'${word//\'/\'\\\'\'}'"
        fi
        line+="${line:+ }$quoted"
    done
    printf '%s\n' "$line"
}
