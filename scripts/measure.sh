#!/usr/bin/env bash
# Measures what records/ tells of one GPU: about 20 minutes on an H200.
#
#   bash scripts/measure.sh DATA OUT           # DATA: a folder of shards, OUT: one for the results
#   bash scripts/measure.sh DATA OUT speed     # some of the parts alone, in the order below
#   PYTHON=python3 bash scripts/measure.sh ... # not the venv's
#
#   compile   a step with each --mlp and --codec, all at once, so that no run waits for the compiler
#   proofs    300 deterministic steps of eager, of dense and of bitsparse (codec exponent; also with
#             its two fp8 storages), and 60 with a buffer that fits and with 1 % of one. All at
#             once: their losses and weights count, not their times
#   speed     54 steps of each, one after the other
#   kernels vram optimum nemotron              # the benches, the first three at what proofs trained
#   ranks                                      # with several GPUs
#
# OUT gets NAME.txt, what a run or a bench printed, and NAME.json of a bench, for its --from; the
# runs' logs are in OUT/logs/NAME/, for scripts/new_record.py. A part that fails ends the script.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=.
if [[ -n ${PYTHON:-} ]]; then python=$PYTHON; else source scripts/venv.sh; fi

all=(compile proofs speed kernels vram optimum nemotron ranks)
if (( $# < 2 )) || [[ ! -d $1 ]]; then
    echo "$0: expected a folder of shards, a folder for the results and perhaps parts of" \
        "${all[*]}; received $*" >&2
    exit 2
fi
data=$1 out=$2
parts=("${@:3}")
if (( ${#parts[@]} == 0 )); then parts=("${all[@]}"); fi
for part in "${parts[@]}"; do
    [[ " ${all[*]} " == *" $part "* ]] ||
        { echo "$0: expected parts of ${all[*]}; received $part" >&2; exit 2; }
done
mkdir -p "$out"

names=(eager dense raw sign exponent)
declare -A saved=([eager]="--mlp eager" [dense]="--mlp dense" [raw]="--mlp bitsparse"
    [sign]="--mlp bitsparse --codec sign" [exponent]="--mlp bitsparse --codec exponent")
proof="--deterministic --microbatch-tokens 8192 --val-sequence 16384"

# run NAME SCRIPT OPTION...
run() {
    echo "$(date +%T) $1"
    "$python" "${@:2}" > "$out/$1.txt" 2>&1 || { echo "$1 failed: $out/$1.txt" >&2; return 1; }
}

# train NAME OPTION...
train() {
    run "$1" train_gpt.py --preset offline --data "$data" --no-wandb --log-dir "$out/logs/$1" \
        "${@:2}"
}

# bench NAME SCRIPT OPTION...
bench() { run "$1" "scripts/$2" "${@:3}" --json "$out/$1.json"; }

wait_all() { for job in $(jobs -p); do wait "$job"; done; }

trap 'jobs -p | xargs -r kill 2> /dev/null || true' EXIT  # where one failed

for part in "${parts[@]}"; do
    trained=$(compgen -G "$out/logs/proof-exponent/*/step-00000300.pt" | tail -1 || true)
    if [[ " kernels vram optimum " == *" $part "* && -z $trained ]]; then
        echo "$0: $part needs what the part proofs trains, and there is nothing in" \
            "$out/logs/proof-exponent" >&2
        exit 1
    fi
    case $part in
        compile)
            for name in "${names[@]}"; do
                train "compile-$name" ${saved[$name]} --steps 1 --keep 0 &
            done
            wait_all ;;
        proofs)
            for name in eager dense; do
                train "proof-$name" ${saved[$name]} $proof --steps 300 --keep 0 &
            done
            train proof-exponent ${saved[exponent]} $proof --steps 300 --keep 1 &
            for storage in float8_e4m3fn float8_e5m2; do
                train "proof-$storage" ${saved[exponent]} --storage $storage $proof --steps 300 \
                    --keep 0 &
            done
            train buffer-fits ${saved[exponent]} $proof --steps 60 --keep 0 &
            train buffer-overflows ${saved[exponent]} $proof --steps 60 --keep 0 --buffer-mib 2 &
            wait_all ;;
        speed)
            for name in "${names[@]}"; do train "speed-$name" ${saved[$name]} --keep 0; done ;;
        kernels)
            bench kernels bench_kernels.py --peers --checkpoint "$trained" --data "$data" ;;
        vram)
            bench vram bench_vram.py --checkpoint "$trained" --data "$data" \
                --microbatch-tokens 49152 ;;
        optimum)
            bench optimum analyze_compression.py --checkpoint "$trained" --data "$data" \
                --curves "bf16=$(echo "$out"/logs/proof-exponent/*.txt)" \
                "e4m3=$(echo "$out"/logs/proof-float8_e4m3fn/*.txt)" \
                "e5m2=$(echo "$out"/logs/proof-float8_e5m2/*.txt)" ;;
        nemotron) bench nemotron bench_nemotron_h.py ;;
        ranks) bench ranks bench_ranks.py --data "$data" ;;
    esac
done
echo "$(date +%T) measured: $out"
