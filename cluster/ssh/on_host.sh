# What train.sh runs on each host, after `folder`, `activate`, `run` and `words`. Not to be called by hand.
# shellcheck shell=bash disable=SC2154

# Lines with the host's name. It goes on reading when nobody hears it any more, so that the run can still save.
named() {
    trap '' PIPE
    while IFS= read -r line || [ -n "$line" ]; do printf '%s: %s\n' "$HOSTNAME" "$line"; done 2> /dev/null
}

# Runs the launcher, passes `stop` on, and stops it when nothing is heard of train.sh for a minute.
train() {
    cd "$folder" || exit 2
    # shellcheck source=/dev/null
    [ ! -e "$activate" ] || . "$activate"
    # An earlier start on this host, whose connection was lost, has to end first: its launcher holds the lock.
    mkdir -p ~/.cache/recipes || exit 2  # not in /tmp, where the name could be another user's FIFO
    lock=~/.cache/recipes/$HOSTNAME-$run.lock
    exec 8> "$lock"
    until flock -n 8; do
        read -r -t 60 order && [ -z "$order" ] || exit 75
    done
    "${words[@]}" < /dev/null &
    launcher=$! silent='' asked=''
    while kill -0 "$launcher" 2> /dev/null; do
        [ -n "$silent" ] && sleep 1 || read -r -t 60 order || silent=1
        if [ -n "$silent$order" ] && [ -z "$asked" ]; then
            kill -TERM "$launcher" && asked=1
        fi
    done
    rm -f "$lock"
    wait "$launcher"
}

{
    set -o pipefail
    trap '' HUP PIPE
    { train 2>&1 1>&3 3>&- | named >&2 3>&-; } 3>&1 | named
    exit
}
