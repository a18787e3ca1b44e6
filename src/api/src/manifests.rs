//! The generated files of `deploy/`.

use serde_json::{Value, json};

use super::json::set;
use super::webhooks::configurations;
use super::{crds, keys};

/// Path below `deploy/`, and the manifest.
#[must_use]
pub fn manifests() -> Vec<(String, Value)> {
    let crds = crds().into_iter().map(|crd| {
        let mut manifest = json!(crd);
        let to = ["spec", "conversion", "webhook", "clientConfig", "url"];
        if manifest.pointer("/spec/conversion/webhook").is_some() {
            // Removes the URL that a manager with `WEBHOOK_HOST` wrote in the Service's place.
            set(&mut manifest, &to, Value::Null);
        }
        (format!("crds/{}.yaml", crd.spec.names.plural), manifest)
    });
    let webhooks = configurations(keys::SYSTEM_NAMESPACE).into_iter();
    let webhooks = webhooks.zip(["webhooks/mutating.yaml", "webhooks/validating.yaml"]);
    crds.chain(webhooks.map(|(manifest, path)| (path.to_owned(), manifest)))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn generated_files_in_deploy_are_current() {
        let deploy = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        for (path, manifest) in manifests() {
            let there = std::fs::read_to_string(deploy.join(&path)).unwrap_or_default();
            let current = there == serde_yaml::to_string(&manifest).unwrap();
            assert!(current, "deploy/{path} is stale: run `cargo xtask codegen`");
        }
    }
}
