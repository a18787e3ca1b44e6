//! `cargo xtask codegen`: writes the generated files that are kept in the repository.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use testbed::cluster::finish;

/// Writes `deploy/crds` and `deploy/webhooks`.
pub fn run() -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo
        .args([
            "run",
            "--quiet",
            "--package",
            "kruise-api",
            "--example",
            "codegen",
        ])
        .current_dir(repository());
    finish(&mut cargo).context("the files in deploy/ could not be written")?;
    println!("deploy/crds and deploy/webhooks are current");
    Ok(())
}

/// The folder of what cargo builds.
pub fn target() -> std::path::PathBuf {
    let elsewhere = std::env::var_os("CARGO_TARGET_DIR");
    elsewhere.map_or_else(|| repository().join("target"), std::path::PathBuf::from)
}

/// The repository's folder.
pub fn repository() -> std::path::PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    dir.parent().unwrap_or(dir).to_owned()
}
