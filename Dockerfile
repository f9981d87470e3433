# Tracker, agent and commands in one image: docker build -t p2pdist:local .
#
# It builds with BuildKit and with the classic builder. Wheels that lie in wheels/ are preferred to downloading them; with all of them
# there, and a base that has the programs, it builds without a network:
#     docker build --network none --build-arg PIP_OPTIONS=--no-index --build-arg PACKAGES= -t p2pdist:local .
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ARG PIP_OPTIONS=
WORKDIR /source
# LICENSE stands here a second time because a COPY must find something, and wheels/ need not be there.
COPY LICENSE wheels* /wheels/
COPY pyproject.toml README.md LICENSE ./
COPY p2pdist p2pdist
COPY tracker tracker
# An environment without pip, filled by the pip of the base: what is copied from here brings no build tools along.
RUN python -m venv --without-pip /opt/p2pdist \
    && pip --python /opt/p2pdist/bin/python install --no-cache-dir --disable-pip-version-check --find-links /wheels \
        ${PIP_OPTIONS} '.[postgresql,fuse,age]'

FROM ${BASE}
# mksquashfs and unsquashfs; squashfuse with fusermount3 for packages that are shown in a user namespace; umount; who https:// trusts;
# libfuse, which fuse3 brings, for lazy views.
ARG PACKAGES="ca-certificates fuse3 mount squashfs-tools squashfuse"
RUN if [ -n "${PACKAGES}" ]; then \
        apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ${PACKAGES} \
        && rm -rf /var/lib/apt/lists/*; \
    fi
# The group may write, so that an agent that is root without further capabilities can share directories with the commands of this user.
RUN groupadd --gid 10001 p2pdist \
    && useradd --uid 10001 --gid p2pdist --no-create-home --home-dir /var/lib/p2pdist --shell /usr/sbin/nologin p2pdist \
    && install -d -o p2pdist -g p2pdist -m 0770 /var/lib/p2pdist /run/p2pdist \
    && install -d -o p2pdist -g p2pdist -m 0775 /srv/origin
COPY --from=build /opt/p2pdist /opt/p2pdist
ENV PATH=/opt/p2pdist/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
# The tracker; an agent's streams; its BitTorrent peers.
EXPOSE 7070 7071 7072
ENTRYPOINT ["p2pdist"]
CMD ["--help"]
