#!/bin/sh
# Makes the secrets of a server that are not there yet, in FOLDER or in secrets/ beside this file.
# Files that ndif reads have the names of its variables.
#
# The folder is its owner's alone. Its files can be read by who reaches them: compose mounts each into the
# containers that name it, where programs run as users of their own.
set -eu
umask 077
folder=${1:-$(dirname "$0")/secrets}
mkdir -p "$folder"
chmod 0700 "$folder"
cd "$folder"

keep() { # NAME: what standard input says, unless there is such a file
    [ -s "$1" ] && return
    cat > ".$1"
    chmod 0444 ".$1"
    mv ".$1" "$1"
}
random() { # 256 bits in letters and digits that no URL has to escape
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

for name in redis_password postgres_password ndif_object_store_access_key ndif_object_store_secret_key \
    ndif_cluster_secret influxdb_admin_password influxdb_write_password influxdb_read_password \
    grafana_admin_password ray_auth_token; do
    random | keep "$name"
done
printf 'redis://:%s@%s:6379/0' "$(cat redis_password)" "${BROKER_HOST:-message_broker}" | keep ndif_broker_url
printf 'http://ndif:%s@influxdb:8086/ndif' "$(cat influxdb_write_password)" | keep ndif_influxdb_url
# Optional: a token of the Hugging Face Hub, for gated and private models.
[ -e hf_token ] || : > hf_token
chmod 0444 hf_token
