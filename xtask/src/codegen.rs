//! `cargo xtask codegen`: writes the generated files that are kept in the repository.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use testbed::cluster::run_command;

/// Folders of `deploy/` whose manifests the Helm chart has, too.
const CHART_FOLDERS: [&str; 8] = [
    "crds",
    "credential-providers",
    "default",
    "manager",
    "observability",
    "policies",
    "rbac",
    "webhooks",
];

/// Writes `deploy/crds` and `deploy/webhooks`, and copies manifests of `deploy/` into the Helm chart.
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
    let chart = chart_files_dir();
    if chart.exists() {
        fs::remove_dir_all(&chart).with_context(|| format!("cannot remove {}", chart.display()))?;
    }
    for (path, text) in manifests_for_chart()? {
        let target = chart.join(path);
        fs::create_dir_all(target.parent().unwrap_or(&chart))?;
        fs::write(&target, text).with_context(|| format!("cannot write {}", target.display()))?;
    }
    println!("deploy/crds, deploy/webhooks and deploy/helm/kruise/files are current");
    Ok(())
}

fn chart_files_dir() -> PathBuf {
    repository_dir().join("deploy/helm/kruise/files")
}

/// Path below `files/` of the chart and text of each manifest, without those of workloads: these are templates there.
fn manifests_for_chart() -> Result<BTreeMap<PathBuf, String>> {
    let deploy = repository_dir().join("deploy");
    let mut manifests = BTreeMap::new();
    for folder in CHART_FOLDERS {
        for entry in fs::read_dir(deploy.join(folder))? {
            let name = entry?.file_name();
            let text = fs::read_to_string(deploy.join(folder).join(&name))?;
            // Not all files in `observability` are manifests.
            let copied = name != "kustomization.yaml"
                && text.contains("\nkind: ")
                && !text.contains("\nkind: Deployment\n");
            if copied {
                manifests.insert(Path::new(folder).join(name), text);
            }
        }
    }
    Ok(manifests)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn manifests_in_chart_are_current() {
        let expected = manifests_for_chart().unwrap();
        assert!(expected.len() > 20);
        let chart = chart_files_dir();
        let mut found = BTreeMap::new();
        for folder in fs::read_dir(&chart).unwrap() {
            for file in fs::read_dir(folder.unwrap().path()).unwrap() {
                let path = file.unwrap().path();
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path.strip_prefix(&chart).unwrap().to_owned(), text);
            }
        }
        let stale = || {
            expected
                .iter()
                .find(|(path, text)| found.get(*path) != Some(text))
        };
        assert_eq!(
            stale().map(|(path, _)| path),
            None,
            "stale: run `cargo xtask codegen`"
        );
        assert!(found.keys().eq(expected.keys()), "run `cargo xtask codegen`");
    }
}
