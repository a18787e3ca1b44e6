//! Credentials: of which registry, of which secret, and errors for those that cannot be used.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Secret;
use kruise_api::node_image::ImagePullPhase;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use crate::faults::DaemonFixture;
use crate::pull_node::tag;

pub const NAMESPACE: &str = "kruise-daemon-config";
pub const IMAGE: &str = "private.test/team/app";

impl DaemonFixture {
    /// A bed whose runtime requires `u` and `p` for the image's tags.
    async fn start_private(name: &str) -> Self {
        let fixture = Self::start(name).await;
        fixture.require_credentials();
        fixture
    }

    /// Makes the runtime require `u` and `p` for the image's tags.
    pub fn require_credentials(&self) {
        for tag in ["1", "2"] {
            self.cri
                .state()
                .credentials
                .insert(format!("{IMAGE}:{tag}"), ("u".to_owned(), "p".to_owned()));
        }
    }

    async fn create_secret(
        &self,
        name: &str,
        type_: &str,
        entry: &str,
        value: &str,
        references: Option<&str>,
    ) {
        let mut annotations = json!({});
        if let Some(references) = references {
            annotations["imagepulljobs.kruise.io/references"] = json!(references);
        }
        let object = json!({"type": type_, "metadata": {"name": name, "annotations": annotations},
            "data": {entry: STANDARD.encode(value)}});
        Api::<Secret>::namespaced(self.node.client.clone(), NAMESPACE)
            .create(&PostParams::default(), &serde_json::from_value(object).unwrap())
            .await
            .unwrap();
    }

    pub async fn create_login_secret(&self, name: &str, password: &str, references: Option<&str>) {
        let config = json!({"auths": {"private.test": {"username": "u", "password": password}}}).to_string();
        self.create_secret(
            name,
            "kubernetes.io/dockerconfigjson",
            ".dockerconfigjson",
            &config,
            references,
        )
        .await;
    }

    async fn create_node_image_with(&self, secrets: &[&str], tags: Value) {
        let refs: Vec<_> = secrets
            .iter()
            .map(|s| json!({"namespace": NAMESPACE, "name": s}))
            .collect();
        self.node
            .create_node_image(json!({IMAGE: {"pullSecrets": refs, "tags": tags}}))
            .await;
    }
}

fn tag_owned_by(name: &str, job: &str) -> Value {
    tag(
        name,
        json!({"pullPolicy": {"backoffLimit": 0},
        "ownerReferences": [{"kind": "ImagePullJob", "namespace": "default", "name": job, "uid": job}]}),
    )
}

#[tokio::test]
async fn pull_secrets_of_both_types_are_tried_in_order() {
    let fixture = DaemonFixture::start_private("several").await;
    let _daemon = fixture.start_daemon(&[]);
    fixture.create_login_secret("several-wrong", "wrong", None).await;
    let cfg = json!({"private.test/team": {"auth": STANDARD.encode("nobody:x")}, "private.test": {"auth": STANDARD.encode("u:p")}});
    fixture
        .create_secret(
            "several-cfg",
            "kubernetes.io/dockercfg",
            ".dockercfg",
            &cfg.to_string(),
            None,
        )
        .await;
    fixture
        .create_node_image_with(&["several-wrong", "several-cfg"], json!([tag_owned_by("1", "j")]))
        .await;
    assert_eq!(
        fixture.node.wait_tag_complete(IMAGE, "1").await.phase,
        ImagePullPhase::Succeeded
    );
    let tried: Vec<_> = fixture
        .cri
        .state()
        .pulls
        .iter()
        .map(|p| p.auth.clone().unwrap())
        .map(|a| (a.username, a.password))
        .collect();
    let pair = |u: &str, p: &str| (u.to_owned(), p.to_owned());
    assert_eq!(
        tried,
        [pair("nobody", "x"), pair("u", "wrong"), pair("u", "p")],
        "the most specific first, then in order"
    );
}

#[tokio::test]
async fn credentials_are_used_for_their_own_job_only() {
    let fixture = DaemonFixture::start_private("per-job").await;
    let _daemon = fixture.start_daemon(&[]);
    fixture
        .create_login_secret("per-job-mine", "p", Some("default/mine,other/mine"))
        .await;
    fixture
        .create_node_image_with(
            &["per-job-mine"],
            json!([tag_owned_by("1", "mine"), tag_owned_by("2", "theirs")]),
        )
        .await;
    assert_eq!(
        fixture.node.wait_tag_complete(IMAGE, "1").await.phase,
        ImagePullPhase::Succeeded
    );
    let other_job = fixture.node.wait_tag_complete(IMAGE, "2").await;
    assert_eq!(other_job.phase, ImagePullPhase::Failed);
    assert!(
        other_job
            .message
            .unwrap()
            .contains("refuses the credentials, or wants some")
    );
}

#[tokio::test]
async fn unusable_pull_secret_is_reported_in_tag_message() {
    let fixture = DaemonFixture::start_private("useless").await;
    let _daemon = fixture.start_daemon(&[]);
    fixture
        .create_secret("useless-type", "Opaque", "a", "b", None)
        .await;
    fixture
        .create_secret(
            "useless-auth",
            "kubernetes.io/dockercfg",
            ".dockercfg",
            r#"{"private.test": {"auth": "%%%"}}"#,
            None,
        )
        .await;
    let names = ["useless-missing", "useless-type", "useless-auth"];
    fixture
        .create_node_image_with(&names, json!([tag_owned_by("1", "j")]))
        .await;
    let message = fixture.node.wait_tag_complete(IMAGE, "1").await.message.unwrap();
    for words in [
        "pull secret kruise-daemon-config/useless-missing cannot be used: it does not exist",
        "pull secret kruise-daemon-config/useless-type cannot be used: it is of type \"Opaque\"",
        "pull secret kruise-daemon-config/useless-auth cannot be used: its entry for \"private.test\"",
        "refuses the credentials, or wants some",
    ] {
        assert!(message.contains(words), "{words:?} is not in {message:?}");
    }
}

#[tokio::test]
async fn pull_secret_of_another_namespace_is_forbidden() {
    let fixture = DaemonFixture::start_private("elsewhere").await;
    let _daemon = fixture.start_daemon(&[]);
    let refs = json!([{"namespace": "kube-system", "name": "any"}]);
    fixture
        .node
        .create_node_image(json!({IMAGE: {"pullSecrets": refs, "tags": [tag_owned_by("1", "j")]}}))
        .await;
    let message = fixture.node.wait_tag_complete(IMAGE, "1").await.message.unwrap();
    assert!(
        message.contains("pull secret kube-system/any cannot be used: it cannot be read"),
        "{message}"
    );
    assert!(message.contains("forbidden"), "{message}");
}
