#!/bin/sh
# One run on two "machines": two network namespaces of this computer, linked by a virtual cable. Needs root and `ip`.
#
#   sh docs/two_machines.sh FOLDER dfca run quickstart --out runs/two
#
# Each machine starts its half as on real ones, where you call the same line on both:
#
#   torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m dfca run ...
#
# FOLDER gets what each machine prints (a.log, b.log). The run folder is written by the first rank alone.
set -eu
folder=$1 # where the logs go
shift 2   # the word "dfca"
python=${PYTHON:-python}
tag=$$
a=dfca-a-$tag b=dfca-b-$tag
mkdir -p "$folder"

clean() {
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
}
trap clean EXIT INT TERM

ip netns add "$a"
ip netns add "$b"
ip link add "va$tag" netns "$a" type veth peer name "vb$tag" netns "$b"
ip -n "$a" addr add 10.77.0.1/24 dev "va$tag"
ip -n "$b" addr add 10.77.0.2/24 dev "vb$tag"
for each in "$a va$tag" "$b vb$tag"; do
    set -- $each -- "$@"
    ip -n "$1" link set lo up
    ip -n "$1" link set "$2" up
    shift 3
done

machine() { # namespace, network device, log, command
    space=$1 cable=$2 log=$3
    shift 3
    GLOO_SOCKET_IFNAME=$cable ip netns exec "$space" "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
        --rdzv-backend c10d --rdzv-id "$tag" --rdzv-endpoint 10.77.0.1:29500 --local-addr "$address" \
        --rdzv-conf "is_host=$host" \
        -m dfca "$@" >"$folder/$log" 2>&1
}

# Both have this computer's name: say which one is the host, which real machines find by their names.
address=10.77.0.2 host=false
machine "$b" "vb$tag" b.log "$@" &
second=$!
address=10.77.0.1 host=true
status=0
machine "$a" "va$tag" a.log "$@" || status=$?
wait "$second" || status=$?
cat "$folder/a.log" "$folder/b.log"
exit "$status"
