#!/bin/bash
# The first process of a container. `docker stop` sends SIGTERM to it alone, and the container ends with it. So it passes the
# signal on, and stays until all processes have ended: those of a one-process `accelerate launch`, which itself ends at once,
# notice that and save. A launcher or Python in its place would ignore SIGTERM until it has installed a handler.
[ $$ = 1 ] || exec "$@"
"$@" &
command=$!
trap 'asked=1; kill -TERM "$command" 2> /dev/null' TERM INT
while kill -0 "$command" 2> /dev/null; do wait "$command"; done # it returns early at a signal that is trapped
wait "$command"
code=$?
while [ -n "${asked-}" ]; do
    processes=(/proc/[0-9]*)
    [ ${#processes[@]} -gt 1 ] || break
    sleep 0.2
done
exit "$code"
