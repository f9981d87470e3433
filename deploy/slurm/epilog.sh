#!/bin/sh
exec /usr/bin/p2pdist slurm epilog --tracker http://tracker:7070 2>>/var/log/p2pdist-slurm.log
