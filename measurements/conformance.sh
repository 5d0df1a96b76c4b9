#!/usr/bin/env bash
# The default matrix on public attention functions, one JSON report each, then calibration over many seeds.
#   measurements/conformance.sh OUTPUT_FOLDER [SECONDS_FOR_CALIBRATION]
# On a GPU: PyTorch's SDPA forced to FlashAttention-2, memory-efficient and cuDNN, and compiled flex_attention.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
out=$1
seconds=${2:-240}
mkdir -p "$out" && out=$(cd "$out" && pwd)
export PYTHONPATH=$root PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=1
cd "$(mktemp -d)" # so that no ini file of this repository applies
plugin=$(python3 -c 'import importlib.metadata as m; print("" if any(e.name == "flashattn" for e in m.entry_points(group="pytest11")) else "-p pytest_flashattn.plugin")')
suite() { # implementation, further arguments
  name=${1##*:}; shift
  python3 -m pytest $plugin flashattn-suite --flashattn-impl="pytest_flashattn.peers:$name" --flashattn-matrix=default \
    --flashattn-json="$out/conformance-$name.json" --tb=short -p no:cacheprovider "$@" > "$out/conformance-$name.log" 2>&1
  echo "$name: $(tail -n 1 "$out/conformance-$name.log")"
}
suite flex_compiled -n 10 &
flex=$!
for name in sdpa_flash sdpa_efficient sdpa_cudnn; do suite $name & pids="${pids:-} $!"; done
wait $pids
for name in sdpa_flash sdpa_efficient sdpa_cudnn; do
  python3 "$root/measurements/calibrate.py" --impl "pytest_flashattn.peers:$name" --seeds 20 --limit "$seconds" \
    --out "$out/calibration-$name.json" > "$out/calibration-$name.log" 2>&1 &
done
wait
tail -n 4 "$out"/calibration-*.log
