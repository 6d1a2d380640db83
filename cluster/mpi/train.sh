#!/usr/bin/env bash
# Trains with mpirun, of Open MPI or MPICH (or Intel MPI), on the machines of a list. Run it on the first of them:
#
#   cluster/mpi/train.sh hosts.txt recipes/cls.py --data FOLDER --name run
#
# hosts.txt has one machine per line: the name or address by which the others reach it, and its number of GPUs, such as
# `10.0.0.1 8`; # starts a comment. After the list come the recipe and its flags. SIGTERM or Ctrl-C lets the run save a
# checkpoint; the same command resumes it, and also a run that lost a process or a machine, which ends at once.

# Edit these, or set them in the environment.
export ACCELERATE_MIXED_PRECISION=${ACCELERATE_MIXED_PRECISION:-bf16} # or no, fp16
PYTHON=${PYTHON:-$PWD/.venv/bin/python} # the same path on all machines
MASTER_PORT=${MASTER_PORT:-29500}       # the first machine listens here for the others
GRACE=${GRACE:-10}                      # seconds that Open MPI gives processes to end; it always waits them out, several times

set -eu
if [ $# -lt 2 ] || [ ! -r "$1" ]; then
    echo "usage: $0 HOSTS RECIPE FLAGS..., where HOSTS is a file with a machine and its number of GPUs per line" >&2
    exit 2
fi
list=$(mktemp)
trap 'rm -f "$list"' EXIT
processes=0 MASTER_ADDR=
while read -r host slots _; do
    case $host in '' | '#'*) continue ;; esac
    case $slots in '' | *[!0-9]*) echo "$1: $host needs its number of GPUs behind it" >&2; exit 2 ;; esac
    MASTER_ADDR=${MASTER_ADDR:-$host}
    processes=$((processes + slots))
    echo "$host $slots" >> "$list"
done < "$1"
shift
export MASTER_ADDR MASTER_PORT TORCH_CPP_LOG_LEVEL=ERROR # errors only: it warns of addresses without names

if mpirun --version | grep -q 'Open MPI\|Open-MPI\|OpenRTE'; then
    sed -i 's/ / slots=/' "$list"
    # Without --bind-to none, a process and all its data workers share one core.
    words=(--hostfile "$list" --bind-to none)
    for name in MASTER_ADDR MASTER_PORT ACCELERATE_MIXED_PRECISION ACCELERATE_USE_CPU TORCH_CPP_LOG_LEVEL PATH; do
        [ -z "${!name-}" ] || words+=(-x "$name") # MPICH passes on the whole environment
    done
    export OMPI_MCA_odls_base_sigkill_timeout=$GRACE PRTE_MCA_odls_base_sigkill_timeout=$GRACE # versions 4 and 5
    stop=USR1 # is passed on; after SIGTERM mpirun itself ends the processes
else
    sed -i 's/ /:/' "$list"
    words=(-f "$list")
    stop=TERM
fi
asked=0
mpirun "${words[@]}" -n "$processes" "$PYTHON" "$@" &
mpirun=$!
trap 'asked=75; kill -s "$stop" "$mpirun"' INT TERM HUP
while kill -0 "$mpirun" 2> /dev/null; do wait "$mpirun" && code=0 || code=$?; done
[ "$code" != 0 ] || code=$asked # MPICH ends with 0 after a signal
exit "$code"
