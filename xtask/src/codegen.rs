//! `cargo xtask codegen`: writes the generated files that are kept in the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use testbed::cluster::run_command;

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
        .current_dir(repository_dir());
    run_command(&mut cargo).context("the files in deploy/ could not be written")?;
    println!("deploy/crds and deploy/webhooks are current");
    Ok(())
}

/// Metadata of the workspace from cargo.
pub fn cargo_metadata() -> Result<Value> {
    let mut cargo = Command::new("cargo");
    cargo
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(repository_dir());
    Ok(serde_json::from_str(&run_command(&mut cargo)?)?)
}

/// Cargo's target folder, from its metadata.
pub fn target_dir(metadata: &Value) -> Result<PathBuf> {
    let target = metadata["target_directory"].as_str();
    Ok(target.context("cargo metadata has another form")?.into())
}

/// Root folder of the repository.
pub fn repository_dir() -> PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    dir.parent().unwrap_or(dir).to_owned()
}
