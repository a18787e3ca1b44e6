//! Generates the node control API from `proto/`.

fn main() -> std::io::Result<()> {
    // Without this, any new file of the repository would be a reason to build anew.
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure().compile_protos(&["proto/kruise/node/v1/control.proto"], &["proto"])
}
