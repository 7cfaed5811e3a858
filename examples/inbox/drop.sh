#!/bin/sh
# Drop files into the inbox: a copy beside the queue, and a rename into it, so that no reader ever sees half a file.
#
#   ./drop.sh FILE...
set -eu

inbox=spool/inbox
mkdir -p "$inbox/tmp" "$inbox/queue"
for file in "$@"; do
    name=$(basename "$file")
    cp -- "$file" "$inbox/tmp/$name.$$"
    mv -- "$inbox/tmp/$name.$$" "$inbox/queue/$name"
done
