#!/bin/sh
# Runs the tests of an NVIDIA GPU, then benchmarks on it: make gpu [ONLY=limits,recipe] [MINUTES=60] [OUT=folder]
#
# Each part is a process of its own, with a log in the folder, and takes at most a quarter of the time that is left. One
# that fails or is stopped does not stop the others: an engine that breaks the CUDA context takes only its part with it.
# Results and measurements stay in the folder, and the next run goes on with them. Not run on a GPU yet.
set -u
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-python3}
ONLY=${ONLY:-}
OUT=${OUT:-gpu-results}
end_s=$(($(date +%s) + 60 * ${MINUTES:-15}))
failed=0
"$PYTHON" -c 'import sys, torch
torch.cuda.is_available() or sys.exit("torch finds no GPU: python -m mucudnn doctor says why")' || exit 1
mkdir -p "$OUT" || exit 1
: > "$OUT/summary.txt"
export MUCUDNN_DATABASE="$OUT/measurements.sqlite" PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"

is_wanted() { # NAME
	[ -n "$ONLY" ] || return 0
	for prefix in $(echo "$ONLY" | tr , ' '); do
		case $1 in "$prefix"*) return 0 ;; esac
	done
	return 1
}

limit_s() {
	echo $(((end_s - $(date +%s)) / 4))
}

part() { # NAME MODULE ARGUMENT...
	name=$1
	shift
	is_wanted "$name" || return 0
	limit=$(limit_s)
	if [ "$limit" -lt 5 ]; then
		outcome="left out: the time is over"
	else
		timeout --foreground --signal=INT --kill-after=10 "$limit" "$PYTHON" -m "$@" > "$OUT/$name.log" 2>&1
		status=$?
		case $status in
			0) outcome=passed ;;
			124 | 137) outcome="stopped after $limit s" ;;
			*) outcome="failed with exit status $status" ;;
		esac
	fi
	[ "$outcome" = passed ] || failed=1
	echo "$name: $outcome" | tee -a "$OUT/summary.txt"
}

bench() { # NAME ARGUMENT...: a benchmark with a folder of results
	name=$1
	shift
	part "$name" mucudnn bench "$@" --device cuda --out "$OUT/$name"
}

seconds() { # that a part should take
	echo $(($(limit_s) * 4 / 5 + 1))
}

tests() { # NAME ARGUMENT...: warnings of other versions of libraries are no errors
	name=$1
	shift
	part "$name" pytest -m gpu -vv -W default -p no:cacheprovider --durations=10 --junitxml="$OUT/$name.xml" "$@"
}

part doctor mucudnn doctor
nvidia-smi -q > "$OUT/nvidia-smi.log" 2>&1

# The first 15 minutes on a device: what no GPU has passed yet, then the decoders and the patches.
tests test_gpu_ranks tests/gpu/test_gpu_ranks.py
tests test_gpu_within tests/gpu/test_gpu_within.py
tests test_volumes -k volume tests/gpu/test_gpu.py
for decoder in limit bands clip; do
	part "decoder-$decoder" support.cuda.decoders $decoder --out "$OUT/decoder-$decoder"
done
bench patches convolutions mucudnn.bench.sources.networks.video:qwen_patches --input 3x2x14x14 --batch 1024 \
	--dtype bfloat16 --algorithms patches --time-limit 5s

for file in tests/gpu/test_gpu*.py; do
	name=$(basename "$file" .py)
	case $name in test_gpu_ranks | test_gpu_within) ;; *) tests "$name" "$file" ;; esac
done

bench limits convolutions deepbench-train --batch 256 --filter 3x3,5x5 \
	--workspace-limit 8MiB,64MiB,128MiB,256MiB,512MiB,none --run-time-limit "$(seconds)s"
bench network-alexnet convolutions alexnet --batch 64 --time-limit 1s
bench network-resnet18 convolutions resnet18 --batch 64 --time-limit 1s
bench network-vgg16 convolutions vgg16 --batch 32 --time-limit 1s
for network in alexnet resnet50 vgg16; do
	bench "training-$network" training $network --time-limit 1s --variants torch-benchmark,mucudnn --run-time-limit "$(seconds)s"
done
# The paper's experiments and training steps, the shorter ones first.
for recipe in conv2-desirable-set three-policies training-steps-short reuse-against-division budget-division \
	memory-per-layer deepbench training-steps; do
	part "recipe-$recipe" mucudnn bench recipe $recipe --device cuda --out "$OUT/recipe-$recipe"
done
exit $failed
