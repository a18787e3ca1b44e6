//! Pull secrets of jobs: copied for the daemons, kept up to date, and gone with the last job.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Event, Secret};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::jobs::until_event;
use crate::world::{
    Answer, World, answer, asked, completed, create, job, jobs, nodes, until, until_gone, world,
};

const INTO: &str = "kruise-daemon-config";

fn source(name: &str, password: &str) -> Value {
    json!({
        "metadata": { "name": name, "labels": { "team": "a" }, "annotations": { "note": "private" } },
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": { ".dockerconfigjson": config(password) },
    })
}

fn config(password: &str) -> String {
    json!({ "auths": { "r": { "username": "u", "password": password } } }).to_string()
}

fn data(secret: &Secret) -> Option<&ByteString> {
    secret.data.as_ref()?.get(".dockerconfigjson")
}

/// The one copy of a source.
async fn copy_of(copies: &Api<Secret>, source: &str) -> Option<Secret> {
    let key = format!("default/{source}");
    let all = copies.list(&ListParams::default()).await.unwrap();
    let mut mine = all
        .into_iter()
        .filter(|s| s.annotations().get("imagepulljobs.kruise.io/source-key") == Some(&key));
    let copy = mine.next();
    assert!(mine.next().is_none(), "two copies of {source}");
    copy
}

/// Waits until the copy names these jobs, and no others.
async fn referred_to_by(copies: &Api<Secret>, name: &str, jobs: &'static str) {
    let wanted = |s: &Secret| {
        let named = s.annotations().get("imagepulljobs.kruise.io/references");
        named.is_some_and(|named| named == jobs)
    };
    until(copies, name, jobs, wanted).await;
}

#[tokio::test]
async fn a_copy_follows_its_source_is_shared_and_goes_with_the_last_job() {
    let admin = world().admin().await;
    nodes(&admin, &["secret-1"], json!({ "set": "secret" })).await;
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    let copies = Api::<Secret>::namespaced(admin.client.clone(), INTO);
    create(&sources, source("pull", "one")).await;
    for name in ["secret-a", "secret-b"] {
        let spec = json!({ "image": format!("r/private:{name}"), "pullSecrets": ["pull"],
            "selector": { "matchLabels": { "set": "secret" } } });
        create(&jobs(&admin), job(name, spec)).await;
    }
    asked(&admin, "secret-1", "r/private", "secret-a").await;
    let image = asked(&admin, "secret-1", "r/private", "secret-b").await;
    let copy = copy_of(&copies, "pull").await.expect("a copy");
    let named = &image.spec.images["r/private"].pull_secrets;
    assert_eq!(named.len(), 1);
    assert_eq!((&*named[0].namespace, &named[0].name), (INTO, &copy.name_any()));
    assert_eq!(named[0].mode.as_deref(), Some("batch"));
    assert_eq!(copy.type_.as_deref(), Some("kubernetes.io/dockerconfigjson"));
    let note = copy.annotations().contains_key("note");
    assert!(copy.labels().is_empty() && !note, "{copy:?}");
    referred_to_by(&copies, &copy.name_any(), "default/secret-a,default/secret-b").await;

    let new = Patch::Merge(json!({ "stringData": { ".dockerconfigjson": config("two") } }));
    let params = PatchParams::default();
    sources.patch("pull", &params, &new).await.unwrap();
    until(&copies, &copy.name_any(), "as its source", |s: &Secret| {
        data(s).is_some_and(|d| d.0 == config("two").into_bytes())
    })
    .await;

    let now = DeleteParams::default();
    jobs(&admin).delete("secret-a", &now).await.unwrap();
    until_gone(&jobs(&admin), "secret-a").await;
    referred_to_by(&copies, &copy.name_any(), "default/secret-b").await;
    answer(&admin, "secret-1", Answer::Succeeded).await;
    until(&jobs(&admin), "secret-b", "ended", completed).await;
    until_gone(&copies, &copy.name_any()).await;
    until(&jobs(&admin), "secret-b", "let go", |j: &ImagePullJob| {
        j.finalizers().is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_source_that_comes_late_is_copied_under_the_name_that_nodes_were_told() {
    let admin = world().admin().await;
    nodes(&admin, &["latesecret-1"], json!({ "set": "latesecret" })).await;
    let spec = json!({ "image": "r/late:1", "pullSecrets": ["late"], "selector": { "matchLabels": { "set": "latesecret" } } });
    create(&jobs(&admin), job("latesecret", spec)).await;
    let image: NodeImage = asked(&admin, "latesecret-1", "r/late", "1").await;
    let name = image.spec.images["r/late"].pull_secrets[0].name.clone();
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    let copies = Api::<Secret>::namespaced(admin.client.clone(), INTO);
    assert!(copies.get_opt(&name).await.unwrap().is_none());
    create(&sources, source("late", "one")).await;
    until(&copies, &name, "copied", |s: &Secret| data(s).is_some()).await;
    // A source that goes takes the credentials with it.
    sources.delete("late", &DeleteParams::default()).await.unwrap();
    until_gone(&copies, &name).await;
}

#[tokio::test]
async fn a_secret_of_another_type_is_not_copied() {
    let admin = world().admin().await;
    nodes(&admin, &["opaque-1"], json!({ "set": "opaque" })).await;
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    let copies = Api::<Secret>::namespaced(admin.client.clone(), INTO);
    let opaque =
        json!({ "metadata": { "name": "opaque" }, "stringData": { ".dockerconfigjson": config("one") } });
    create(&sources, opaque).await;
    let spec = json!({ "image": "r/opaque:1", "pullSecrets": ["opaque"],
        "selector": { "matchLabels": { "set": "opaque" } } });
    create(&jobs(&admin), job("opaque", spec)).await;
    asked(&admin, "opaque-1", "r/opaque", "1").await;
    assert!(copy_of(&copies, "opaque").await.is_none());
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    until_event(&events, "opaque", "PullSecretNotUsable").await;
    let job = jobs(&admin).get("opaque").await.unwrap();
    assert!(
        job.finalizers().is_empty(),
        "there is no copy that it must be struck off"
    );
}

#[tokio::test]
async fn a_manager_that_may_not_read_secrets_works_and_its_jobs_can_be_deleted() {
    const READER: &str = "kruise-manager-secret-reader";
    let world = World::new();
    let admin = world.admin().await;
    let bindings = Api::<ClusterRoleBinding>::all(admin.client.clone());
    let binding = bindings.get(READER).await.unwrap();
    bindings.delete(READER, &DeleteParams::default()).await.unwrap();
    let mut manager = world.manager("kruise-manager");
    manager.start().unwrap();
    nodes(&admin, &["no-reader-1"], json!({})).await;
    let sources = Api::<Secret>::namespaced(admin.client.clone(), "default");
    create(&sources, source("pull", "one")).await;
    for name in ["deleted", "waits"] {
        let spec = json!({ "image": format!("r/private:{name}"), "pullSecrets": ["pull"] });
        create(&jobs(&admin), job(name, spec)).await;
    }
    let events = Api::<Event>::namespaced(admin.client.clone(), "default");
    for name in ["deleted", "waits"] {
        until_event(&events, name, "PullSecretsNotCopied").await;
    }
    jobs(&admin)
        .delete("deleted", &DeleteParams::default())
        .await
        .unwrap();
    until_gone(&jobs(&admin), "deleted").await;
    create(&jobs(&admin), job("plain", json!({ "image": "nginx:plain" }))).await;
    asked(&admin, "no-reader-1", "nginx", "plain").await;
    answer(&admin, "no-reader-1", Answer::Succeeded).await;
    until(&jobs(&admin), "plain", "ended", completed).await;

    let mut binding = json!(binding);
    binding["metadata"] = json!({ "name": READER });
    create(&bindings, binding).await;
    let image = asked(&admin, "no-reader-1", "r/private", "waits").await;
    assert_eq!(image.spec.images["r/private"].pull_secrets.len(), 1);
}
