#!/usr/bin/env bash
# Trains on the hosts of a list, over plain ssh. Run it on any machine that reaches them with a key, such as the first host:
#
#   cluster/ssh/train.sh hosts.txt --config_file accelerate_configs/2node_bf16.yaml recipes/cls.py --data FOLDER --name run
#
# hosts.txt has one host per line, as ssh takes it (name, address or user@name); # starts a comment. The first one is the main
# machine: the others have to reach it by that name, and it has to stay. After the list come the words of `accelerate launch`.
# A host that is lost joins again as soon as ssh reaches it. Ctrl-C lets the run save a checkpoint and stop (exit code 75); the
# same command resumes it. The exit code is that of the main machine's launcher, or 255 if ssh can't reach it.

# Edit these, or set them in the environment.
FOLDER=${FOLDER:-$PWD}     # the repository on each host; the run folder in it has to be one that all hosts share
ACTIVATE=${ACTIVATE:-.venv/bin/activate} # what makes `accelerate` known there
AT_LEAST=${AT_LEAST:-1}    # the run goes on with so many hosts
RESTARTS=${RESTARTS:-3}    # so often the processes of a host are replaced after a crash
PORT=${PORT:-29500}        # the main machine listens here for the others
RETRY=${RETRY:-30}         # seconds until the command is started again on a host that was lost

set -u
if [ $# -lt 2 ] || [ ! -r "$1" ]; then
    echo "usage: $0 HOSTS WORDS..., where HOSTS is a file and WORDS are those of accelerate launch" >&2
    exit 2
fi
hosts=()
while read -r host _; do
    case $host in '' | '#'*) ;; *) hosts+=("$host") ;; esac
done < "$1"
shift
[ ${#hosts[@]} -gt 0 ] || { echo "$0: the list has no host" >&2; exit 2; }
words=(accelerate launch --num_machines "${#hosts[@]}" --main_process_ip "${hosts[0]#*@}" --main_process_port "$PORT"
    --max_restarts "$RESTARTS" --rdzv_conf "at_least=$AT_LEAST" "$@")
here=$(dirname "$0")
state=$(mktemp -d) || exit
trap 'rm -rf "$state"' EXIT
trap 'touch "$state/stop"' INT TERM HUP

# What a host gets on its standard input: settings, a program, and then a line per second, so that it knows that we are there.
talk() {
    printf 'folder=%q activate=%q run=%q words=(%s)\n' "$FOLDER" "$ACTIVATE" "${hosts[0]#*@}-$PORT" "$(printf '%q ' "${words[@]}")"
    cat "$here/on_host.sh"
    while kill -0 $$ 2> /dev/null; do # $$ is this script, also in a subshell
        if [ -e "$state/stop" ]; then echo stop; else echo; fi
        sleep 1
    done
}

# Trains on a host until the run is over there; its exit code goes to a file.
attend() {
    trap '' INT TERM HUP # Ctrl-C reaches all that runs in this terminal, and ssh must stay until the hosts have stopped
    while :; do
        talk 2> /dev/null | ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 \
            "$1" bash -s
        code=${PIPESTATUS[1]}
        echo "$code" > "$state/code_$2"
        [ "$2" != 0 ] && [ "$code" != 0 ] && [ "$code" != 2 ] || return # 2: refused, as it will be again
        for ((second = 0; second < RETRY; second++)); do
            [ ! -e "$state/stop" ] && [ ! -e "$state/code_0" ] && kill -0 $$ 2> /dev/null || return
            sleep 1
        done
        echo "$1: ended with $code; starting again" >&2
    done
}

pids=()
for number in "${!hosts[@]}"; do
    attend "${hosts[number]}" "$number" &
    pids+=($!)
done
# `wait` returns early at a signal that is trapped.
while kill -0 "${pids[0]}" 2> /dev/null; do wait "${pids[0]}"; done
for pid in "${pids[@]:1}"; do
    # The other launchers end by themselves, but one that was about to join would wait for minutes.
    for ((second = 0; second < 15; second++)); do
        kill -0 "$pid" 2> /dev/null || break
        sleep 1
    done
done
touch "$state/stop"
wait
exit "$(cat "$state/code_0")"
