//! Credentials: whose, which, and what is said of those that cannot be used.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::core::v1::Secret;
use kruise_api::node_image::ImagePullPhase;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};

use crate::faults::Bed;
use crate::world::tag;

pub const NAMESPACE: &str = "kruise-daemon-config";
pub const IMAGE: &str = "private.test/team/app";

impl Bed {
    /// A bed whose runtime wants `u` and `p` for the image's tags.
    async fn private(name: &str) -> Self {
        let bed = Self::make(name).await;
        bed.lock();
        bed
    }

    /// Makes the runtime want `u` and `p` for the image's tags.
    pub fn lock(&self) {
        for tag in ["1", "2"] {
            self.cri
                .state()
                .passwords
                .insert(format!("{IMAGE}:{tag}"), ("u".to_owned(), "p".to_owned()));
        }
    }

    async fn secret(&self, name: &str, type_: &str, entry: &str, value: &str, references: Option<&str>) {
        let mut annotations = json!({});
        if let Some(references) = references {
            annotations["imagepulljobs.kruise.io/references"] = json!(references);
        }
        let secret = json!({"type": type_, "metadata": {"name": name, "annotations": annotations},
            "data": {entry: STANDARD.encode(value)}});
        Api::<Secret>::namespaced(self.node.client.clone(), NAMESPACE)
            .create(&PostParams::default(), &serde_json::from_value(secret).unwrap())
            .await
            .unwrap();
    }

    pub async fn login(&self, name: &str, password: &str, references: Option<&str>) {
        let config = json!({"auths": {"private.test": {"username": "u", "password": password}}}).to_string();
        self.secret(
            name,
            "kubernetes.io/dockerconfigjson",
            ".dockerconfigjson",
            &config,
            references,
        )
        .await;
    }

    async fn ask_with(&self, secrets: &[&str], tags: Value) {
        let refs: Vec<_> = secrets
            .iter()
            .map(|s| json!({"namespace": NAMESPACE, "name": s}))
            .collect();
        self.node
            .ask(json!({IMAGE: {"pullSecrets": refs, "tags": tags}}))
            .await;
    }
}

fn owned(name: &str, job: &str) -> Value {
    tag(
        name,
        json!({"pullPolicy": {"backoffLimit": 0},
        "ownerReferences": [{"kind": "ImagePullJob", "namespace": "default", "name": job, "uid": job}]}),
    )
}

#[tokio::test]
async fn several_secrets_of_both_types_are_tried_in_order() {
    let bed = Bed::private("several").await;
    let _daemon = bed.daemon(&[]);
    bed.login("several-wrong", "wrong", None).await;
    let cfg = json!({"private.test/team": {"auth": STANDARD.encode("nobody:x")}, "private.test": {"auth": STANDARD.encode("u:p")}});
    bed.secret(
        "several-cfg",
        "kubernetes.io/dockercfg",
        ".dockercfg",
        &cfg.to_string(),
        None,
    )
    .await;
    bed.ask_with(&["several-wrong", "several-cfg"], json!([owned("1", "j")]))
        .await;
    assert_eq!(
        bed.node.until_over(IMAGE, "1").await.phase,
        ImagePullPhase::Succeeded
    );
    let tried: Vec<_> = bed
        .cri
        .state()
        .pulls
        .iter()
        .map(|p| p.auth.clone().unwrap())
        .map(|a| (a.username, a.password))
        .collect();
    let of = |u: &str, p: &str| (u.to_owned(), p.to_owned());
    assert_eq!(
        tried,
        [of("nobody", "x"), of("u", "wrong"), of("u", "p")],
        "the most specific first, then in order"
    );
}

#[tokio::test]
async fn credentials_serve_the_job_that_brought_them_and_no_other() {
    let bed = Bed::private("per-job").await;
    let _daemon = bed.daemon(&[]);
    bed.login("per-job-mine", "p", Some("default/mine,other/mine"))
        .await;
    bed.ask_with(
        &["per-job-mine"],
        json!([owned("1", "mine"), owned("2", "theirs")]),
    )
    .await;
    assert_eq!(
        bed.node.until_over(IMAGE, "1").await.phase,
        ImagePullPhase::Succeeded
    );
    let theirs = bed.node.until_over(IMAGE, "2").await;
    assert_eq!(theirs.phase, ImagePullPhase::Failed);
    assert!(
        theirs
            .message
            .unwrap()
            .contains("refuses the credentials, or wants some")
    );
}

#[tokio::test]
async fn a_secret_that_cannot_be_used_is_the_tags_message() {
    let bed = Bed::private("useless").await;
    let _daemon = bed.daemon(&[]);
    bed.secret("useless-type", "Opaque", "a", "b", None).await;
    bed.secret(
        "useless-auth",
        "kubernetes.io/dockercfg",
        ".dockercfg",
        r#"{"private.test": {"auth": "%%%"}}"#,
        None,
    )
    .await;
    let names = ["useless-missing", "useless-type", "useless-auth"];
    bed.ask_with(&names, json!([owned("1", "j")])).await;
    let message = bed.node.until_over(IMAGE, "1").await.message.unwrap();
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
async fn a_secret_elsewhere_may_not_be_read_and_that_is_said() {
    let bed = Bed::private("elsewhere").await;
    let _daemon = bed.daemon(&[]);
    let refs = json!([{"namespace": "kube-system", "name": "any"}]);
    bed.node
        .ask(json!({IMAGE: {"pullSecrets": refs, "tags": [owned("1", "j")]}}))
        .await;
    let message = bed.node.until_over(IMAGE, "1").await.message.unwrap();
    assert!(
        message.contains("pull secret kube-system/any cannot be used: it cannot be read"),
        "{message}"
    );
    assert!(message.contains("forbidden"), "{message}");
}
