//! `cargo xtask codegen`: writes the generated files that are kept in the repository.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use testbed::cluster::finish;
use testbed::cluster::prepare::{self, Part};

/// Writes `deploy/crds` and `deploy/webhooks`. The tests that find stale files write them when they are
/// told to, so that there is only one way these files come about.
pub fn run() -> Result<()> {
    prepare::ensure(&testbed::cluster::Cache::open()?, &[Part::Protoc])?;
    let mut cargo = Command::new("cargo");
    cargo
        .args(["test", "--quiet", "--workspace", "--lib"])
        .arg("files_in_deploy_are_current")
        .env("KRUISE_CODEGEN", "1")
        .current_dir(repository());
    finish(&mut cargo).context("the files in deploy/ could not be written")?;
    println!("deploy/crds and deploy/webhooks are current");
    Ok(())
}

/// The repository's folder.
pub fn repository() -> std::path::PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    dir.parent().unwrap_or(dir).to_owned()
}
