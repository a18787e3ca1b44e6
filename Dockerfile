# Both programs as images of one static binary each, for amd64 and arm64.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --target kruise-daemon  -t REGISTRY/kruise-daemon  .
#   docker buildx build --platform linux/amd64,linux/arm64 --target kruise-manager -t REGISTRY/kruise-manager .

# The builder runs on the machine's own platform and compiles for the one that is asked for.
FROM --platform=$BUILDPLATFORM rust:1.95-bookworm AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends clang llvm protobuf-compiler \
 && rm -rf /var/lib/apt/lists/*
ARG TARGETARCH
RUN case "$TARGETARCH" in \
      amd64) echo x86_64-unknown-linux-musl ;; \
      arm64) echo aarch64-unknown-linux-musl ;; \
      *) echo "there is no build for $TARGETARCH" >&2; exit 1 ;; \
    esac > /target
WORKDIR /src
COPY rust-toolchain.toml .
RUN rustup target add "$(cat /target)"
COPY . .
# clang compiles what is C for either platform, and Rust's own linker links it with the musl of Rust's target.
ENV CC_x86_64_unknown_linux_musl=clang AR_x86_64_unknown_linux_musl=llvm-ar \
    CC_aarch64_unknown_linux_musl=clang AR_aarch64_unknown_linux_musl=llvm-ar
RUN RUSTFLAGS="-Clink-self-contained=yes -Clinker=rust-lld" \
    cargo build --release --locked --target "$(cat /target)" --bins \
 && mkdir /out && cp "target/$(cat /target)/release/kruise-daemon" "target/$(cat /target)/release/kruise-manager" /out/

# The runtime's socket is root's, so the daemon is root too, with no capability and nothing it could write.
FROM scratch AS kruise-daemon
COPY --from=build /out/kruise-daemon /kruise-daemon
ENTRYPOINT ["/kruise-daemon"]

FROM scratch AS kruise-manager
COPY --from=build /out/kruise-manager /kruise-manager
USER 65532:65532
ENTRYPOINT ["/kruise-manager"]
