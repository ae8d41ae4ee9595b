#!/bin/bash
# The first process of a node: it sets up the mounts of its namespaces, creates a file as a signal, and becomes the reaper.
#   init.sh FOLDER PAUSE
set -euo pipefail
folder=$1 pause=$2

mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$folder" "$folder"
mount --make-rshared "$folder" # kubelet and pods share what is mounted below

for place in /run /var/log /var/lib/cni /var/lib/kubelet; do
    mount -t tmpfs -o mode=755 tmpfs "$place"
    mount --make-rshared "$place"
done
mkdir -p /run/netns /var/log/containers /var/log/pods

# kubelet sets these for the whole machine, so it gets copies.
mkdir "$folder/sysctl"
for name in kernel/panic kernel/panic_on_oops vm/overcommit_memory vm/panic_on_oom kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
    if [ -f "/proc/sys/$name" ]; then
        copy="$folder/sysctl/${name//\//.}"
        cat "/proc/sys/$name" >"$copy"
        mount --bind "$copy" "/proc/sys/$name"
    fi
done

ip link set lo up
touch "$folder/begun"
exec "$pause"
