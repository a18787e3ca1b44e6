//! Pull secrets of jobs: copied for the daemons, kept up to date, and deleted with the last job.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Event, Secret};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::jobs::wait_for_event;
use crate::test_cluster::{
    PullOutcome, TestCluster, completed, create, create_nodes, job, jobs, report_pull, shared_cluster,
    wait_for_tag, wait_until, wait_until_deleted,
};

const COPY_NAMESPACE: &str = "kruise-daemon-config";

fn pull_secret(name: &str, password: &str) -> Value {
    json!({
        "metadata": { "name": name, "labels": { "team": "a" }, "annotations": { "note": "private" } },
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": { ".dockerconfigjson": docker_config(password) },
    })
}

fn docker_config(password: &str) -> String {
    json!({ "auths": { "r": { "username": "u", "password": password } } }).to_string()
}

fn docker_config_bytes(secret: &Secret) -> Option<&ByteString> {
    secret.data.as_ref()?.get(".dockerconfigjson")
}

/// The one copy of a source secret.
async fn copy_of(copies: &Api<Secret>, source: &str) -> Option<Secret> {
    let key = format!("default/{source}");
    let all = copies.list(&ListParams::default()).await.unwrap();
    let mut matching = all
        .into_iter()
        .filter(|s| s.annotations().get("imagepulljobs.kruise.io/source-key") == Some(&key));
    let copy = matching.next();
    assert!(matching.next().is_none(), "two copies of {source}");
    copy
}

/// Waits until the copy refers to exactly these jobs.
async fn wait_for_references(copies: &Api<Secret>, name: &str, jobs: &'static str) {
    let matches = |s: &Secret| {
        let references = s.annotations().get("imagepulljobs.kruise.io/references");
        references.is_some_and(|secret_refs| secret_refs == jobs)
    };
    wait_until(copies, name, jobs, matches).await;
}

#[tokio::test]
async fn pull_secret_copy_follows_source_until_last_job_ends() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["secret-1"], json!({ "set": "secret" })).await;
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    let copies = Api::<Secret>::namespaced(admin.client.clone(), COPY_NAMESPACE);
    create(&sources, pull_secret("pull", "one")).await;
    for name in ["secret-a", "secret-b"] {
        let spec = json!({ "image": format!("r/private:{name}"), "pullSecrets": ["pull"],
            "selector": { "matchLabels": { "set": "secret" } } });
        create(&jobs(&admin), job(name, spec)).await;
    }
    wait_for_tag(&admin, "secret-1", "r/private", "secret-a").await;
    let image = wait_for_tag(&admin, "secret-1", "r/private", "secret-b").await;
    let copy = copy_of(&copies, "pull").await.expect("a copy");
    let named = &image.spec.images["r/private"].pull_secrets;
    assert_eq!(named.len(), 1);
    assert_eq!(
        (&*named[0].namespace, &named[0].name),
        (COPY_NAMESPACE, &copy.name_any())
    );
    assert_eq!(named[0].mode.as_deref(), Some("batch"));
    assert_eq!(copy.type_.as_deref(), Some("kubernetes.io/dockerconfigjson"));
    let note = copy.annotations().contains_key("note");
    assert!(copy.labels().is_empty() && !note, "{copy:?}");
    wait_for_references(&copies, &copy.name_any(), "default/secret-a,default/secret-b").await;

    let new_password = Patch::Merge(json!({ "stringData": { ".dockerconfigjson": docker_config("two") } }));
    let params = PatchParams::default();
    sources.patch("pull", &params, &new_password).await.unwrap();
    wait_until(&copies, &copy.name_any(), "as its source", |s: &Secret| {
        docker_config_bytes(s).is_some_and(|d| d.0 == docker_config("two").into_bytes())
    })
    .await;

    let now = DeleteParams::default();
    jobs(&admin).delete("secret-a", &now).await.unwrap();
    wait_until_deleted(&jobs(&admin), "secret-a").await;
    wait_for_references(&copies, &copy.name_any(), "default/secret-b").await;
    report_pull(&admin, "secret-1", PullOutcome::Succeeded).await;
    wait_until(&jobs(&admin), "secret-b", "ended", completed).await;
    wait_until_deleted(&copies, &copy.name_any()).await;
    wait_until(
        &jobs(&admin),
        "secret-b",
        "its finalizers are removed",
        |j: &ImagePullJob| j.finalizers().is_empty(),
    )
    .await;
}

#[tokio::test]
async fn late_pull_secret_is_copied_under_the_announced_name() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["latesecret-1"], json!({ "set": "latesecret" })).await;
    let spec = json!({ "image": "r/late:1", "pullSecrets": ["late"], "selector": { "matchLabels": { "set": "latesecret" } } });
    create(&jobs(&admin), job("latesecret", spec)).await;
    let image: NodeImage = wait_for_tag(&admin, "latesecret-1", "r/late", "1").await;
    let name = image.spec.images["r/late"].pull_secrets[0].name.clone();
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    let copies = Api::<Secret>::namespaced(admin.client.clone(), COPY_NAMESPACE);
    assert!(copies.get_opt(&name).await.unwrap().is_none());
    create(&sources, pull_secret("late", "one")).await;
    wait_until(&copies, &name, "copied", |s: &Secret| {
        docker_config_bytes(s).is_some()
    })
    .await;
    // When the source is deleted, so are the copied credentials.
    sources.delete("late", &DeleteParams::default()).await.unwrap();
    wait_until_deleted(&copies, &name).await;
}

#[tokio::test]
async fn secret_of_wrong_type_is_not_copied() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["opaque-1"], json!({ "set": "opaque" })).await;
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    let copies = Api::<Secret>::namespaced(admin.client.clone(), COPY_NAMESPACE);
    let opaque = json!({ "metadata": { "name": "opaque" }, "stringData": { ".dockerconfigjson": docker_config("one") } });
    create(&sources, opaque).await;
    let spec = json!({ "image": "r/opaque:1", "pullSecrets": ["opaque"],
        "selector": { "matchLabels": { "set": "opaque" } } });
    create(&jobs(&admin), job("opaque", spec)).await;
    wait_for_tag(&admin, "opaque-1", "r/opaque", "1").await;
    assert!(copy_of(&copies, "opaque").await.is_none());
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    wait_for_event(&events, "opaque", "PullSecretNotUsable").await;
    let job = jobs(&admin).get("opaque").await.unwrap();
    assert!(
        job.finalizers().is_empty(),
        "there is no copy that it must be struck off"
    );
}

#[tokio::test]
async fn manager_without_secret_access_still_works() {
    const READER: &str = "kruise-manager-secret-reader";
    let cluster = TestCluster::new();
    let admin = cluster.admin().await;
    let bindings = Api::<ClusterRoleBinding>::all(admin.client.clone());
    let binding = bindings.get(READER).await.unwrap();
    bindings.delete(READER, &DeleteParams::default()).await.unwrap();
    let mut manager = cluster.manager("kruise-manager");
    manager.start().unwrap();
    create_nodes(&admin, &["no-reader-1"], json!({})).await;
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    create(&sources, pull_secret("pull", "one")).await;
    for name in ["deleted", "waits"] {
        let spec = json!({ "image": format!("r/private:{name}"), "pullSecrets": ["pull"] });
        create(&jobs(&admin), job(name, spec)).await;
    }
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    for name in ["deleted", "waits"] {
        wait_for_event(&events, name, "PullSecretsNotCopied").await;
    }
    jobs(&admin)
        .delete("deleted", &DeleteParams::default())
        .await
        .unwrap();
    wait_until_deleted(&jobs(&admin), "deleted").await;
    create(&jobs(&admin), job("plain", json!({ "image": "nginx:plain" }))).await;
    wait_for_tag(&admin, "no-reader-1", "nginx", "plain").await;
    report_pull(&admin, "no-reader-1", PullOutcome::Succeeded).await;
    wait_until(&jobs(&admin), "plain", "ended", completed).await;

    let mut binding = json!(binding);
    binding["metadata"] = json!({ "name": READER });
    create(&bindings, binding).await;
    let image = wait_for_tag(&admin, "no-reader-1", "r/private", "waits").await;
    assert_eq!(image.spec.images["r/private"].pull_secrets.len(), 1);
}

#[tokio::test]
async fn node_image_names_the_service_accounts_of_jobs() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["account-1"], json!({ "set": "account" })).await;
    let request = async |name: &'static str, account: Option<&str>| {
        let image = format!("r/accounts:{name}");
        let mut spec = json!({ "image": image, "selector": { "matchLabels": { "set": "account" } } });
        if let Some(account) = account {
            spec["serviceAccountName"] = json!(account);
        }
        create(&jobs(&admin), job(name, spec)).await;
        let image = wait_for_tag(&admin, "account-1", "r/accounts", name).await;
        let accounts = image.spec.images["r/accounts"].service_accounts.iter();
        let names = accounts.map(|account| format!("{}/{}", account.namespace, account.name));
        names.collect::<Vec<_>>()
    };
    assert_eq!(request("account-a", Some("a")).await, ["default/a"]);
    assert_eq!(request("account-b", Some("b")).await, ["default/a", "default/b"]);
    assert_eq!(request("account-none", None).await, ["default/a", "default/b"]);
    // Without a running job that needs it, an account would decide which plugins are called for the others.
    for name in ["account-a", "account-b"] {
        jobs(&admin).delete(name, &DeleteParams::default()).await.unwrap();
        wait_until_deleted(&jobs(&admin), name).await;
    }
    assert_eq!(request("account-later", None).await, [] as [String; 0]);
}
