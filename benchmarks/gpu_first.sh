#!/bin/sh
# The first run on a machine with a GPU: everything that has only been tried without one, from the smallest to the largest.
#
#     python benchmarks/gpu_pack.py gpu-first.tar.gz        here, where nvcc is, and no GPU
#     tar xzf gpu-first.tar.gz                              there: one GPU, Python, torch with CUDA; no network, no TVM
#     sh gpu-first/gpu_first.sh [RESULTS]                   all steps; stops at the first that fails
#
# PYTHON names the interpreter (python3). Each step is a process of its own, and says what it proves. RESULTS (default:
# gpu-first.txt) has all that was said. The exit code is 0 if every step has passed.

set -u
here=$(cd "$(dirname "$0")" && pwd)
results=${1:-gpu-first.txt}
python=${PYTHON:-python3}
# tvm_ffi is that of TVM's runtime in the payload. Other packages are taken from there only where this machine has none.
path="$here/src:$here/benchmarks:$here/tests:$here/packages/tvm_ffi"
for package in "$here"/packages/*; do
    name=$(basename "$package")
    "$python" -c "import $name" 2>/dev/null || path="$path:$package"
done
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}"
: > "$results"
say() { printf '%s\n' "$*" | tee -a "$results"; }

say "gpu_first: $(cat "$here/revision.txt"), $(uname -sr), $(date -u +%Y-%m-%dT%H:%MZ)"
passed=0
for step in machine load kernels libraries training two-ranks graphs kill memory speed; do
    say "== $step: $("$python" "$here/benchmarks/gpu_first.py" "$here" "$step" --proves)"
    "$python" "$here/benchmarks/gpu_first.py" "$here" "$step" > "$here/said.txt" 2>&1
    code=$?
    tee -a "$results" < "$here/said.txt"
    if [ "$code" -ne 0 ]; then
        say "FAILED: $step ended with $code after $passed steps that passed; later steps were not tried"
        exit 1
    fi
    say "passed: $step"
    passed=$((passed + 1))
done
say "ALL PASSED: $passed steps"
