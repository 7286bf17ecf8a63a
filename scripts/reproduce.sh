#!/usr/bin/env bash
# The whole comparison: N runs each of --mlp eager and --mlp bitsparse, two records, one table.
# N is 3 unless given; everything after it goes to train_gpt.py, in every run.
#
#   bash scripts/reproduce.sh                                # FineWeb to 3.28, 1 to 8 GPUs
#   bash scripts/reproduce.sh 5 --epochs 2
#   bash scripts/reproduce.sh 3 --preset offline --data DIR  # 54 steps over shards of your own
#   bash scripts/reproduce.sh 2 --preset tiny --data data/sample --steps 4    # on a CPU
#
# Without --data, missing FineWeb shards are downloaded first. Logs and records go to
# logs/reproduce/<key>/, the key being made of the sources and arguments: the same command goes on
# where it was stopped, and runs whose log is finished are not made again.
set -euo pipefail

root=$(realpath --relative-to=. "$(dirname "${BASH_SOURCE[0]}")/..")
source "$root/scripts/venv.sh"

runs=3
if [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    runs=$1
    shift
elif [[ -n ${1:-} && $1 != -* ]]; then
    fail "expected a number of runs (1 or more) or an option of train_gpt.py, received $1"
fi
preset=
data=
previous=
for argument in "$@"; do
    case $argument in
        --mlp | --mlp=* | --seed | --seed=* | --log-dir | --log-dir=*)
            fail "${argument%%=*} is set for each run here; leave it out" ;;
        --preset=*) preset=${argument#*=} ;;
        --data=*) data=${argument#*=} ;;
    esac
    case $previous in
        --preset) preset=$argument ;;
        --data) data=$argument ;;
    esac
    previous=$argument
done
arguments=("$@")
if [[ -z $preset ]]; then
    preset=speedrun
    arguments=(--preset speedrun "$@")
fi
command="bash scripts/reproduce.sh $runs$(printf ' %q' "${arguments[@]}")"

# What the runs come to, from train_gpt.py's own reading of the arguments: tokens trained on, and
# tokens validated on, of which a forward takes about a third of a training step's time.
plan='
import math, sys
import torch
from train_gpt import MICROBATCHES, parse_config
sys.argv[0] = "scripts/reproduce.sh"
c = parse_config(sys.argv[1:])
if not torch.cuda.is_available() and c.dim >= 768:
    sys.exit("scripts/reproduce.sh: there is no GPU here, and a CPU needs months for this model; pass "
             "--preset tiny --data data/sample")
validations = 1 + (math.ceil(c.steps / c.val_every) if c.val_every else 1)
print(c.steps, c.steps * MICROBATCHES * c.microbatch_tokens, validations * c.val_tokens,
      min(8, torch.cuda.device_count()))
'
planned=$(PYTHONPATH=$root "$python" -c "$plan" "${arguments[@]}") || exit 1
read -r steps tokens val_tokens gpus <<< "$planned"
# tokens/s: on a GPU the 576,000 of one H200 with the speedrun's record #26, on a CPU about what two
# cores do with the tiny preset. Yours differ; after the first run its own time is taken.
if (( gpus > 0 )); then rate=$(( 576000 * gpus )); else rate=1200; fi
seconds=$(( (tokens + val_tokens / 3) / rate + 120 ))  # and two minutes to start and compile

key=$(cat "$root/train_gpt.py" "$root/bitsparse_kernels.py" - <<< "${command#*.sh "$runs"}" |
    sha256sum | cut -c1-8)  # not of the number of runs: more can be added
folder=$root/logs/reproduce/$key

# finished MLP I: the run's finished log, if there is one. (No source line begins so.)
finished() { grep -sl '^summary: {' "$folder/$1-$2"/*.txt | head -1 || true; }

duration() {
    if (( $1 < 3600 )); then
        echo "$(( ($1 + 59) / 60 )) minutes"
    else
        awk -v s="$1" 'BEGIN { printf "%.1f hours\n", s / 3600 }'
    fi
}

left=0
for (( i = 0; i < runs; i++ )); do
    for mlp in eager bitsparse; do
        [[ -n $(finished "$mlp" "$i") ]] || (( ++left ))
    done
done
echo "plan: --mlp eager and --mlp bitsparse, $runs each; all with ${arguments[*]}"
echo "      $steps steps, $tokens tokens a run; finished in $folder: $(( 2 * runs - left ))" \
    "of $(( 2 * runs ))"
echo "      expected: $(duration $(( left * seconds ))) for what is left" \
    "(at $rate tokens/s; the first run tells better)"

if [[ $preset == speedrun && -z $data && $left -gt 0 ]]; then
    "$python" "$root/data/cached_fineweb10B.py" --dir "$root/data/fineweb10B"
fi

for (( i = 0; i < runs; i++ )); do
    for mlp in eager bitsparse; do  # in turn, so that a machine that slows down slows both
        [[ -z $(finished "$mlp" "$i") ]] || continue
        echo "run: --mlp $mlp --seed $i"
        SECONDS=0
        bash "$root/scripts/run.sh" "${arguments[@]}" --mlp "$mlp" --seed "$i" \
            --log-dir "$folder/$mlp-$i" --keep 0 < /dev/null
        [[ -n $(finished "$mlp" "$i") ]] ||
            fail "the run ended without a summary in $folder/$mlp-$i; run the same command again"
        (( --left )) || true
        (( left == 0 )) || echo "expected: $(duration $(( left * SECONDS ))) more, for $left to go"
    done
done

for mlp in eager bitsparse; do
    logs=()
    for (( i = 0; i < runs; i++ )); do logs+=("$(finished "$mlp" "$i")"); done
    compgen -G "$folder/records/*_$mlp-$preset-$runs" > /dev/null ||
        "$python" "$root/scripts/new_record.py" --name "$mlp-$preset-$runs" \
            --records "$folder/records" --claim "$preset preset with --mlp $mlp, $runs runs" \
            --command "$command" "${logs[@]}"
done
records=("$folder"/records/*_eager-"$preset-$runs" "$folder"/records/*_bitsparse-"$preset-$runs")
echo "records: ${records[*]}"
echo "(to keep them in this repository: copy them to records/, then python scripts/update_tables.py)"
# Whatever it finds, the comparison was made: its status 1 is an answer, 2 a failure.
"$python" "$root/scripts/compare_records.py" "${records[@]}" || (( $? == 1 ))
