//! Credentials of the node itself: a credential provider plugin that is a real program.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use kruise_api::node_image::ImagePullPhase;
use serde_json::{Value, json};

use crate::faults::DaemonFixture;
use crate::pull_node::tag;
use crate::pull_secrets::IMAGE;

/// A plugin for `private.test`, and the flags by which the daemon finds it.
struct Plugin {
    directory: tempfile::TempDir,
}

impl Plugin {
    fn new(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let provider = json!({ "name": "login", "matchImages": ["private.test"], "defaultCacheDuration": "0s",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "env": [{ "name": "REQUEST", "value": directory.path().join("request") }] });
        let config = json!({ "apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
            "providers": [provider] });
        std::fs::write(directory.path().join("config.yaml"), config.to_string()).unwrap();
        let plugin = Self { directory };
        plugin.set_script(script);
        plugin
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Replaces the executable; one that is running keeps its own.
    fn set_script(&self, script: &str) {
        let new = self.path("new");
        std::fs::write(&new, format!("#!/bin/sh\n{script}")).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(new, self.path("login")).unwrap();
    }

    fn flags(&self) -> [String; 2] {
        let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
        [
            flag("plugin-config-file", &self.path("config.yaml")),
            flag("plugin-bin-dir", self.directory.path()),
        ]
    }
}

/// A script that returns this password for the user `u`.
fn login(password: &str) -> String {
    let response = json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
        "cacheKeyType": "Image", "auth": { "private.test": { "username": "u", "password": password } } });
    format!("cat > \"$REQUEST\"\necho '{response}'\n")
}

#[tokio::test]
async fn plugin_gives_the_credentials_after_those_of_secrets() {
    let plugin = Plugin::new(&login("p"));
    let fixture = DaemonFixture::start("plugin").await;
    fixture.require_credentials();
    let flags = plugin.flags();
    let _daemon = fixture.start_daemon(&[flags[0].as_str(), flags[1].as_str()]);
    fixture.create_login_secret("plugin-wrong", "wrong", None).await;
    let secret = json!({ "namespace": crate::pull_secrets::NAMESPACE, "name": "plugin-wrong" });
    let tags = json!([tag("1", json!({ "pullPolicy": { "backoffLimit": 0 } }))]);
    let images = json!({ IMAGE: { "pullSecrets": [secret], "tags": tags } });
    fixture.node.create_node_image(images).await;
    let status = fixture.node.wait_tag_complete(IMAGE, "1").await;
    assert_eq!(status.phase, ImagePullPhase::Succeeded, "{status:?}");
    let passwords: Vec<_> = fixture
        .cri
        .state()
        .pulls
        .iter()
        .map(|pull| pull.auth.clone().unwrap().password)
        .collect();
    assert_eq!(passwords, ["wrong", "p"]);
    let request = std::fs::read_to_string(plugin.path("request")).unwrap();
    let request: Value = serde_json::from_str(&request).unwrap();
    assert_eq!(
        request,
        json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "kind": "CredentialProviderRequest", "image": IMAGE })
    );
}

#[tokio::test]
async fn plugin_that_fails_is_named_in_the_status() {
    let plugin = Plugin::new("exit 7\n");
    let fixture = DaemonFixture::start("plugin-fails").await;
    fixture.require_credentials();
    let flags = plugin.flags();
    let _daemon = fixture.start_daemon(&[flags[0].as_str(), flags[1].as_str()]);
    let tags = json!([tag("1", json!({ "pullPolicy": { "backoffLimit": 0 } }))]);
    fixture
        .node
        .create_node_image(json!({ IMAGE: { "tags": tags } }))
        .await;
    let status = fixture.node.wait_tag_complete(IMAGE, "1").await;
    assert_eq!(status.phase, ImagePullPhase::Failed, "{status:?}");
    let message = status.message.unwrap_or_default();
    assert!(
        message.contains("credential provider \"login\": it ended with exit status: 7"),
        "{message}"
    );
}
