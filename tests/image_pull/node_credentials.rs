//! Credentials of the node itself: a credential provider plugin that is a real program.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::TokenReview;
use kruise_api::node_image::ImagePullPhase;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use crate::faults::DaemonFixture;
use crate::pull_node::{PullNode, start_control_plane, tag};
use crate::pull_secrets::IMAGE;
use support::fault_cri::FaultCri;

/// A plugin for `private.test`, and the flags by which the daemon finds it.
struct Plugin {
    directory: tempfile::TempDir,
}

impl Plugin {
    fn new(script: &str) -> Self {
        Self::with_token(script, &Value::Null)
    }

    /// With these `tokenAttributes`.
    fn with_token(script: &str, token: &Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let provider = json!({ "name": "login", "matchImages": ["private.test"], "defaultCacheDuration": "0s",
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "tokenAttributes": token,
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

/// A response with this password for the user `u`.
fn response(password: &str) -> Value {
    json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
        "cacheKeyType": "Image", "auth": { "private.test": { "username": "u", "password": password } } })
}

/// A script that returns this password for the user `u`.
fn login(password: &str) -> String {
    format!("cat > \"$REQUEST\"\necho '{}'\n", response(password))
}

/// A script that returns it only for a token of service account `default/puller` and audience `registry.test`.
fn login_with_token(password: &str) -> String {
    let script = r#"request=$(cat)
printf '%s' "$request" > "$REQUEST"
payload=$(printf '%s' "$request" | sed -n 's/.*"serviceAccountToken":"\([^"]*\)".*/\1/p' | cut -d. -f2 | tr '_-' '/+')
claims=$(printf '%s==' "$payload" | base64 -d 2>/dev/null)
case "$claims" in
*'"aud":["registry.test"]'*) ;;
*) exit 4 ;;
esac
case "$claims" in
*'"sub":"system:serviceaccount:default:puller"'*) echo 'RESPONSE' ;;
*) exit 5 ;;
esac
"#;
    script.replace("RESPONSE", &response(password).to_string())
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

/// A NodeImage's tag that a job of this namespace has requested.
fn tag_of(name: &str, namespace: &str, policy: Value) -> Value {
    let owner = json!({ "kind": "ImagePullJob", "namespace": namespace, "name": "j", "uid": namespace });
    tag(name, json!({ "pullPolicy": policy, "ownerReferences": [owner] }))
}

/// With what `deploy/credential-providers` and its patch install.
#[tokio::test]
async fn plugin_gets_a_token_of_the_service_account_of_the_job() {
    let plane = tokio::task::spawn_blocking(start_control_plane).await.unwrap();
    let rbac = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../deploy/credential-providers/rbac.yaml"
    );
    let audiences = r#"[{"op":"replace","path":"/spec/variables/0/expression","value":"['registry.test']"}]"#;
    let policy = "validatingadmissionpolicy/kruise-daemon-tokens";
    let role = "example.com/role=builder";
    for args in [
        &["apply", "-f", rbac][..],
        &["patch", policy, "--type=json", "--patch", audiences],
        &["create", "serviceaccount", "puller", "--namespace=default"],
        &[
            "annotate",
            "serviceaccount",
            "puller",
            role,
            "--namespace=default",
        ],
    ] {
        plane.kubectl(args).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let cri = FaultCri::start(&dir.path().join("cri.sock"));
    let node = PullNode::on_plane(&plane, "plugin-token").await;
    let fixture = DaemonFixture { dir, node, cri };
    fixture.require_credentials();
    let token = json!({ "serviceAccountTokenAudience": "registry.test", "cacheType": "Token",
        "requireServiceAccount": true, "requiredServiceAccountAnnotationKeys": ["example.com/role"] });
    let plugin = Plugin::with_token(&login_with_token("p"), &token);
    let flags = plugin.flags();
    let daemon = fixture.start_daemon(&[flags[0].as_str(), flags[1].as_str()]);
    // Roles and policies may take a moment; the account belongs to the jobs of its namespace alone.
    let tags = [
        tag_of("1", "default", json!({})),
        tag_of("2", "other", json!({ "backoffLimit": 0 })),
    ];
    let accounts = json!([{ "namespace": "default", "name": "puller" }]);
    let images = json!({ IMAGE: { "serviceAccounts": accounts, "tags": tags } });
    fixture.node.create_node_image(images).await;
    let status = fixture.node.wait_tag_complete(IMAGE, "1").await;
    assert_eq!(status.phase, ImagePullPhase::Succeeded, "{status:?}");
    let refused = fixture.node.wait_tag_complete(IMAGE, "2").await;
    assert_eq!(refused.phase, ImagePullPhase::Failed, "{refused:?}");
    let message = refused.message.unwrap_or_default();
    let why = "credential provider \"login\" requires a service account, and a job of this image has no serviceAccountName";
    assert!(message.contains(why), "{message}");

    let request = std::fs::read_to_string(plugin.path("request")).unwrap();
    let mut request: Value = serde_json::from_str(&request).unwrap();
    let token = request["serviceAccountToken"].take();
    let token = token.as_str().unwrap();
    let expected = json!({ "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderRequest",
        "image": IMAGE, "serviceAccountToken": null, "serviceAccountAnnotations": { "example.com/role": "builder" } });
    assert_eq!(request, expected);
    let payload = URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap();
    let claims: Value = serde_json::from_slice(&payload).unwrap();
    assert_eq!(claims["aud"], json!(["registry.test"]));
    assert_eq!(claims["sub"], "system:serviceaccount:default:puller");
    assert_eq!(claims["kubernetes.io"]["node"]["name"], "plugin-token");
    let seconds = claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap();
    assert_eq!(seconds, 600);
    let review = json!({ "spec": { "token": token, "audiences": ["registry.test"] } });
    let review: TokenReview = serde_json::from_value(review).unwrap();
    let reviews: Api<TokenReview> = Api::all(fixture.node.client.clone());
    let review = reviews.create(&PostParams::default(), &review).await.unwrap();
    assert_eq!(review.status.unwrap().authenticated, Some(true));
    assert!(!daemon.log().contains(token), "the token is in the log");
}
