//! Writes the generated files of `deploy/`; `cargo xtask codegen` runs it.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    for (path, manifest) in kruise_api::manifests::manifests() {
        std::fs::write(deploy.join(path), serde_yaml::to_string(&manifest)?)?;
    }
    Ok(())
}
