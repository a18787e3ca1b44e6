# Both programs as images of one static binary each, for amd64 and arm64.
#
#   COMMIT=$(git rev-parse --short=12 HEAD)
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg KRUISE_COMMIT=$COMMIT --target kruise-daemon  -t REGISTRY/kruise-daemon  .
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg KRUISE_COMMIT=$COMMIT --target kruise-manager -t REGISTRY/kruise-manager .
#
# The binaries are made as `cargo xtask demo` makes them, which has no container engine: for the gnu target with the C
# library linked in. With them already built (in target/*/release) the images can be had without the first stage:
#
#   buildah build --build-context build=FOLDER --target kruise-daemon .     where FOLDER/out has both programs
#
# Checked so with buildah, before the images had a licence and labels: an image had one layer of one file, the very
# binary, and it ran alone in there. Of the first stage, checked on Debian bookworm outside a container: the build for
# amd64, and that compiler and flags make a static program for arm64 that runs. The stage as a whole has not been run yet.
#
# Which image of the compiler its tag means changes with Debian's updates. To build with the same one as a release, add
# --build-arg RUST_IMAGE=rust:1.95-bookworm@sha256:…, with the digest in the release's provenance (SECURITY.md).
ARG RUST_IMAGE=rust:1.95-bookworm

# The builder runs on the machine's own platform and compiles for the requested one.
FROM --platform=$BUILDPLATFORM ${RUST_IMAGE} AS build
ARG TARGETARCH
RUN case "$TARGETARCH" in \
      amd64) echo x86_64 ;; \
      arm64) echo aarch64 ;; \
      *) echo "there is no build for $TARGETARCH" >&2; exit 1 ;; \
    esac > /arch
# A C compiler for the target, which also links; the target's own platform has it already.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends protobuf-compiler libprotobuf-dev \
      $([ "$TARGETARCH" = "$(dpkg --print-architecture)" ] \
        || echo "gcc-$(tr _ - < /arch)-linux-gnu" "libc6-dev-$TARGETARCH-cross") \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY rust-toolchain.toml .
RUN rustup target add "$(cat /arch)-unknown-linux-gnu"
COPY . .
ENV CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=x86_64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# What the programs log and `kruise_build_info` shows. Git does not know it here: .dockerignore leaves .git out.
ARG KRUISE_COMMIT
# Neither a path of the builder nor a time is in the programs, as `cargo xtask reproduce` checks: without
# SOURCE_DATE_EPOCH, the allocator's C code has the time of its compilation. Each program is built on its own, so that
# its libraries have only what it needs.
RUN target="$(cat /arch)-unknown-linux-gnu" \
 && cargo fetch --locked --target "$target" \
 && crates=$(echo "$CARGO_HOME"/registry/src/*) \
 && export RUSTFLAGS="-C target-feature=+crt-static --remap-path-prefix=$crates=/crates --remap-path-prefix=/src/target=/target" \
 && export SOURCE_DATE_EPOCH=0 \
 && cargo build --release --locked --package kruise-daemon --target "$target" \
 && cargo build --release --locked --package kruise-manager --target "$target" \
 && mkdir /out && cp "target/$target/release/kruise-daemon" "target/$target/release/kruise-manager" /out/

# What both images have beside their program.
FROM scratch AS described
ARG KRUISE_COMMIT
# Of a release: URL of the repository, and the tag.
ARG IMAGE_SOURCE
ARG IMAGE_VERSION
LABEL org.opencontainers.image.source=$IMAGE_SOURCE \
      org.opencontainers.image.revision=$KRUISE_COMMIT \
      org.opencontainers.image.version=$IMAGE_VERSION \
      org.opencontainers.image.licenses=Apache-2.0
COPY LICENSE /LICENSE

# The runtime's socket is root's, so the daemon is root too, with no capability and nothing it could write.
FROM described AS kruise-daemon
COPY --from=build /out/kruise-daemon /kruise-daemon
ENTRYPOINT ["/kruise-daemon"]

FROM described AS kruise-manager
COPY --from=build /out/kruise-manager /kruise-manager
USER 65532:65532
ENTRYPOINT ["/kruise-manager"]
