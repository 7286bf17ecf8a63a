#!/usr/bin/env bash
# Trains on this machine: environment, data, then torchrun with one process a GPU (or one on the
# CPU). Arguments go to train_gpt.py; what the user passes wins over what this script adds.
#
#   bash scripts/run.sh
#   bash scripts/run.sh --mlp dense --steps 100
#   bash scripts/run.sh --data DIR       # shards of your own; nothing is prepared
#   bash scripts/run.sh --resume latest  # goes on where a stopped or killed run was saved
#   bash scripts/run.sh --help           # train_gpt.py's arguments
#
# Without a GPU it ends with a table of the bytes that each --mlp holds for a token, measured with
# the checkpoint that the run has left (scripts/bench_vram.py).
set -euo pipefail

# Relative, so that paths in logs stay short; the user's own relative paths go on meaning his cwd.
root=$(realpath --relative-to=. "$(dirname "${BASH_SOURCE[0]}")/..")
source "$root/scripts/venv.sh"

# passed FLAG ARGS...: whether --FLAG VALUE or --FLAG=VALUE is among the arguments.
passed() {
    local flag=$1 argument
    for argument in "${@:2}"; do
        [[ $argument == "$flag" || $argument == "$flag="* ]] && return 0
    done
    return 1
}

if passed --help "$@" || passed -h "$@"; then
    exec "$python" "$root/train_gpt.py" --help
fi

count=$("$python" -c 'import torch; print(torch.cuda.device_count())')
processes=1
while (( processes * 2 <= count && processes < 8 )); do (( processes *= 2 )); done
if (( count == 0 )); then
    echo "CPU only: no GPU is here, so one process on the CPU"
elif (( processes < count )); then
    echo "GPUs: $processes of $count (the batch divides over 1, 2, 4 or 8; the others stay idle)"
else
    echo "GPUs: $count"
fi

added=()
preset=offline
epochs=
if ! passed --data "$@"; then
    fineweb=$root/data/fineweb10B
    if compgen -G "$fineweb/fineweb_train_*.bin" > /dev/null &&
        compgen -G "$fineweb/fineweb_val_*.bin" > /dev/null; then
        echo "data: the FineWeb shards in $fineweb"
        added+=(--data "$fineweb")
        preset=speedrun
    else
        echo "data: the offline sample, as $fineweb has no train and val shards"
        "$python" "$root/data/sample.py" --dir "$root/data/sample"
        added+=(--data "$root/data/sample")
        epochs=10  # the sample has 2.2 M tokens, and the offline preset reads 21 M
    fi
fi
(( count > 0 )) || preset=tiny
if ! passed --preset "$@" && ! passed --resume "$@"; then
    added+=(--preset "$preset")
    [[ $preset != offline || -z $epochs ]] || passed --epochs "$@" || added+=(--epochs "$epochs")
fi
arguments=("${added[@]}" "$@")
echo "arguments: ${arguments[*]}"

# Unset, torchrun would give each of several processes one thread and warn about it.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > processes ? cores / processes : 1 ))}

# torchrun's own main, called here because torchrun is often not on PATH, and because it answers a
# failed worker, or a signal that it has passed on, with a traceback of its own, under which the
# worker's one sentence would be lost.
launcher='
import subprocess, sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
bench, launch = sys.argv[1], sys.argv[2:]
try:
    main(launch)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        print(f"run.sh: rank {rank} was killed by signal {-failure.exitcode}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
except SignalException as error:
    sys.exit(128 + error.sigval)
if bench:
    bench = [sys.executable, bench, *launch[3:], "--checkpoint", "latest"]
    sys.exit(subprocess.run(bench).returncode)
'
# Told apart by its first argument: the script that is to run afterwards, or nothing.
bench=
if (( count == 0 )) && ! passed --dry-run "$@"; then bench=$root/scripts/bench_vram.py; fi
exec "$python" -c "$launcher" "$bench" --standalone --nproc_per_node="$processes" \
    "$root/train_gpt.py" "${arguments[@]}"
