#!/bin/sh
# Epilog= of slurm.conf, run as root. Program and socket are where the units of deploy/systemd have them. Name your tracker here, as in agent.env.
export P2PDIST_TRACKER=http://tracker.example.org:7070
exec /opt/p2pdist/bin/p2pdist slurm epilog 2>>/var/log/p2pdist-slurm.log
