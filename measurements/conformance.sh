#!/usr/bin/env bash
# The default matrix on PyTorch's SDPA forced to FlashAttention-2, memory-efficient and cuDNN, one JSON report each,
# then calibration over many seeds. Needs a GPU, pytest-xdist for the replacement of workers that a kernel breaks.
#   measurements/conformance.sh OUTPUT_FOLDER [SECONDS_FOR_CALIBRATION]
# flex_attention compiles every shape, so it runs on many workers and takes longest:
#   pytest flashattn-suite --flashattn-impl=pytest_flashattn.peers:flex_compiled -n 12 --flashattn-timeout=600
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && out=$(cd "$1" && pwd)
seconds=${2:-240}
export PYTHONPATH=$root PYTHONUNBUFFERED=1
cd "$(mktemp -d)" # so that no ini file of this repository applies
plugin=$(python3 -c 'import importlib.metadata as m; print("" if any(e.name == "flashattn" for e in m.entry_points(group="pytest11")) else "-p pytest_flashattn.plugin")')
suite() { # name, implementation
  python3 -m pytest $plugin flashattn-suite --flashattn-impl="$2" --flashattn-matrix=default -n 1 \
    --max-worker-restart=500 --flashattn-json="$out/conformance-$1.json" -p no:cacheprovider > "$out/conformance-$1.log" 2>&1
  echo "$1: $(tail -n 1 "$out/conformance-$1.log")"
}
suite sdpa torch.nn.functional:scaled_dot_product_attention &
for name in sdpa_flash sdpa_efficient sdpa_cudnn; do suite $name pytest_flashattn.peers:$name & done
wait
for name in sdpa_flash sdpa_efficient sdpa_cudnn; do
  python3 "$root/measurements/calibrate.py" --impl "pytest_flashattn.peers:$name" --seeds 20 --limit "$seconds" \
    --out "$out/calibration-$name.json" > "$out/calibration-$name.log" 2>&1 &
done
wait
