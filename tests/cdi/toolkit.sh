#!/bin/sh
# Does what NVIDIA's toolkit documents of its hooks create-symlinks and update-ldcache, and notes how it was called.
set -eu
echo "$@" >>"$0.log"
hook=$2
shift 2
bundle=$(sed -n 's/.*"bundle":"\([^"]*\)".*/\1/p')
root=$(sed -n 's/.*"root":{"path":"\([^"]*\)".*/\1/p' "$bundle/config.json")
case $root in /*) ;; *) root=$bundle/$root ;; esac
case $hook in
    create-symlinks)
        while [ $# -gt 0 ]; do
            ln -sf "${2%%::*}" "$root${2##*::}"
            shift 2
        done ;;
    update-ldcache)
        ldconfig -r "$root" "$2" ;;
esac
