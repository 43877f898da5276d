#!/bin/bash
# A population on the nodes of a Slurm job: a head of Ray on the first one, a worker on each other one, then the command.
#   sbatch --nodes 4 --gpus-per-node 4 deploy/slurm.sh pbt ppo chasing --population 32 --gpus 0.5 --run-dir runs/chasing
# The folder must be visible to all nodes. After a time limit the same sbatch goes on.
#SBATCH --job-name=gpurl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
set -euo pipefail

if [ $# -lt 3 ]; then
    echo "usage: sbatch [options] deploy/slurm.sh pbt|tournament ALGORITHM ENV [settings]" >&2
    exit 2
fi
: "${SLURM_JOB_ID:?it is a script for sbatch}"

# the nodes, and a port that differs between jobs
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}"
port=$((20000 + SLURM_JOB_ID % 20000))
address="$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | cut -d ' ' -f 1):$port"
export RAY_USAGE_STATS_ENABLED=0

# a token that all nodes share: without it anyone in the network could run code here
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export RAY_AUTH_TOKEN

# `ray start --block` stays until the step is ended
steps=()
start_ray() {
    srun --nodes=1 --ntasks=1 --nodelist="$1" ray start --block --disable-usage-stats "${@:2}" &
    steps+=($!)
}
trap 'kill "${steps[@]}" 2>/dev/null || true' EXIT
start_ray "$head" --head --port="$port" --node-ip-address="${address%:*}" --include-dashboard=false
# a head on a slow file system takes its time; this script runs on its node. GPURL_HEAD_SECONDS: a whole number
answers() { (: >"/dev/tcp/${address%:*}/$port") 2>/dev/null; }
for ((second = 0; second < ${GPURL_HEAD_SECONDS:-120}; second++)); do
    if answers; then break; fi
    kill -0 "${steps[0]}" 2>/dev/null || { echo "gpurl: the head of Ray has ended" >&2; exit 1; }
    sleep 1
done
answers || echo "gpurl: no head of Ray answers at $address yet; the workers try on their own" >&2
for node in "${nodes[@]:1}"; do
    start_ray "$node" --address="$address"
done

# the command, on the first node, beside its worker; --overlap shares the step's resources
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" gpurl "$@" --address "$address"
