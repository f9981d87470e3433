#!/bin/sh
# The origin of a yardstick run: publishes FILE into an OCI layout below DIR and serves it with nginx on IP:80.
# With WARM_MIB above 0 it publishes the beginning of FILE as another blob, and writes that blob's digest into WARM.
# Usage: origin.sh P2PDIST FILE DIR IP WARM_MIB WARM
set -eu
p2pdist=$1 file=$2 dir=$3 ip=$4 warm_mib=$5 warm=$6
mkdir -p "$dir/layout"
if [ "$warm_mib" != 0 ]; then
  head -c "$((warm_mib << 20))" "$file" > "$dir/warm"
  "$p2pdist" blob push "$dir/warm" --origin "file://$dir/layout" --json > /dev/null
  sha256sum "$dir/warm" | cut -d ' ' -f 1 > "$warm.part"
  mv "$warm.part" "$warm"
fi
"$p2pdist" blob push "$file" --origin "file://$dir/layout" --json > "$dir/pushed.json"
cat > "$dir/nginx.conf" <<CONF
master_process off; daemon off; pid $dir/nginx.pid; error_log $dir/err.log; user root;
events { worker_connections 1024; }
http {
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
  client_body_temp_path $dir/t1; proxy_temp_path $dir/t2; fastcgi_temp_path $dir/t3; uwsgi_temp_path $dir/t4; scgi_temp_path $dir/t5;
  server { listen $ip:80; root $dir/layout; }
}
CONF
exec nginx -e "$dir/err.log" -c "$dir/nginx.conf"
