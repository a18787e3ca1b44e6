//! `cargo xtask codegen`: writes the generated files that are kept in the repository.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::cluster::finish;
use crate::cluster::prepare::{self, Part};

/// Writes `deploy/crds`, one file per kind, from what `kruise-manager crds` prints.
pub fn run() -> Result<()> {
    prepare::ensure(&crate::cluster::Cache::open()?, &[Part::Protoc])?;
    let root = repository();
    let mut cargo = Command::new("cargo");
    cargo
        .args(["run", "--quiet", "--bin", "kruise-manager", "--", "crds"])
        .current_dir(&root);
    let text = finish(&mut cargo).context("kruise-manager does not print CRDs")?;
    let dir = root.join("deploy/crds");
    for document in text.split("---\n").filter(|d| !d.trim().is_empty()) {
        let name = plural(document).context("a document that is no CRD")?;
        let path = dir.join(format!("{name}.yaml"));
        fs::write(&path, document)?;
        println!("{}", path.strip_prefix(&root).unwrap_or(&path).display());
    }
    Ok(())
}

/// The repository's folder.
pub fn repository() -> std::path::PathBuf {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    dir.parent().unwrap_or(dir).to_owned()
}

/// The kind's plural name: the first word of `metadata.name`.
fn plural(document: &str) -> Option<String> {
    let name = document.lines().find_map(|l| l.strip_prefix("  name: "))?;
    name.trim().split('.').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crd_is_named_by_its_plural() {
        let crd = "kind: CustomResourceDefinition\nmetadata:\n  name: nodeimages.apps.kruise.io\nspec:\n";
        assert_eq!(plural(crd).as_deref(), Some("nodeimages"));
    }
}
