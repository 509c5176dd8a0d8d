# world.sh DIRECTORY KUBELET: run in namespaces of its own, makes a machine of them for one kubelet. What the kubelet and
# containerd write to fixed places goes into DIRECTORY. KUBELET is DIRECTORY/kubelet then, wherever it was before.
# Says "ready", and holds the namespaces until its stdin ends.
set -eu
directory=$1

touch "$directory/kubelet"
mount --bind "$2" "$directory/kubelet"

for place in /var/lib /var/log /run; do
    mkdir -p "$directory$place"
    mount --bind "$directory$place" "$place"
done

# Whatever mixture of versions this machine has: in here it is version 2, with our own cgroup as the root.
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup

# The kubelet sets these for the whole machine, which is not its own: it gets copies.
mkdir "$directory/sysctl"
for name in kernel/keys/root_maxbytes kernel/keys/root_maxkeys kernel/panic kernel/panic_on_oops vm/overcommit_memory \
    vm/panic_on_oom; do
    copy=$directory/sysctl/$(basename "$name")
    cat "/proc/sys/$name" >"$copy"
    mount --bind "$copy" "/proc/sys/$name"
done

# As systemd has it on any host, and kubelets want it.
mount --make-rshared /

ip link set lo up
echo ready
exec cat
