#!/bin/sh
# Epilog= of slurm.conf, run as root. Program and socket are where the units of deploy/systemd have them. Name your tracker here, as in agent.env.
export P2PDIST_TRACKER=https://tracker.example.org:7070
# Of a role that may preseed: p2pdist token create --role scheduler > /etc/p2pdist/slurm.token, mode 0600.
export P2PDIST_TOKEN_FILE=/etc/p2pdist/slurm.token
exec /opt/p2pdist/bin/p2pdist slurm epilog 2>>/var/log/p2pdist-slurm.log
