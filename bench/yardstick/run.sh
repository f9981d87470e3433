#!/bin/sh
# One broadcast on rate-limited network namespaces, with real trackers and agents (needs root).
# PYTHON, P2PDIST and WORK name another interpreter, program and directory; `make bench` gives them and takes care of the clean-up.
# With WARM_MIB every host first pulls another blob of so many MiB, before the run begins: what is learned of the hosts there is known.
# With TRACKER=none there is none: agents find each other by multicast DNS, and know the origin.
# With ACCESS=1 the tracker speaks TLS and makes an access file, and the agents join with its token.
# With TRACKERS=3 so many trackers share the PostgreSQL at STATE, and FAULTS says what happens to them (trackers.py).
# Usage: run.sh SWARM_PY [yardstick options], for example
#   bench/yardstick/run.sh path/to/yardstick/swarm.py --hosts 24 --size-mib 64 --rate-mbit 40 --origin-mbit 80 --repeat 3
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
p2pdist=${P2PDIST:-$root/.venv/bin/p2pdist}
swarm=$1
shift
# Every host waits at a FIFO (pull.py), and all are told at once, unless they are to join one after the other.
go="for host in {work}/*/; do if [ -p \$host/go ]; then : > \$host/GO; : > \$host/go; fi; done"
how=--go-cmd
case " $* " in
*" --join-spread"*) how=--host-go-cmd go=": > {dir}/GO; : > {dir}/go" ;;
esac
ctl="$p2pdist tracker --listen {ctl_ip}:7070 --origin http://{origin_ip} --state {dir}/state --no-discovery --log-level warning"
knows="--tracker http://{ctl_ip}:7070" path=readyz
if [ -n "${ACCESS:-}" ]; then
  ctl="$ctl --access {dir}/access/access.toml"
  knows="--tracker https://{ctl_ip}:7070 --join-file {work}/c/access/join-default.token"
fi
if [ "${TRACKER:-}" = none ]; then
  ctl=true knows="--origin http://{origin_ip} --network-id yardstick" path=healthz
fi
if [ -n "${TRACKERS:-}" ]; then
  ctl="$root/.venv/bin/python $here/trackers.py $p2pdist {ctl_ip} {dir} {work} '$STATE' http://{origin_ip} $TRACKERS '${FAULTS:-}' {ns} {n} {size}"
fi
exec "$python" "$swarm" --method custom --label p2pdist --py "$root/.venv/bin/python" \
  --ctl-cmd "$ctl" \
  --origin-cmd "$here/origin.sh $p2pdist {file} {dir} {ip} ${WARM_MIB:-0} {work}/warm" \
  --agent-cmd "$p2pdist agent $knows --listen {ip}:7071 --store {dir}/store --socket {dir}/sock --name h{i} --rack {rack} --log-level ${LOG_LEVEL:-warning} & while ! curl -sf -o /dev/null --unix-socket {dir}/sock http://agent/$path; do sleep 0.2; done; $here/warm.sh $python ${WARM_MIB:-0} {work}/warm {dir}; $python $here/pull.py {dir} {sha} {out} {done} wait; wait" \
  $how "$go" \
  --warmup 2 --wait-ready --work "${WORK:-/dev/shm/p2pdist-yardstick}" --prefix pd- "$@"
