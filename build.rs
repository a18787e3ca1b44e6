//! Generates the node control API from `proto/`.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure().compile_protos(&["proto/kruise/node/v1/control.proto"], &["proto"])
}
