//! Takes over what another installation stored in the older version.
//!
//! While an object is stored as v1alpha1 each read of it needs our conversion webhook. So the leader
//! writes each once more, which stores it as v1beta1, without the managed fields that were written in v1alpha1, and
//! then strikes v1alpha1 from the CRD's list of stored versions.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams, ObjectMeta};
use serde_json::{Value, json};

use super::crd::Crd;
use crate::api::{self, GROUP, V1ALPHA1, V1BETA1};
use crate::cluster::{Cluster, Error, write};

const PAGE: u32 = 500;
const AT_A_TIME: usize = 8;
/// How often an object is read again because somebody else wrote it.
const TRIES: u32 = 10;
const RETRY: Duration = Duration::from_secs(10);

/// Rewrites until nothing is stored in the older version.
pub(super) async fn renew(cluster: &Cluster) {
    for crd in api::crds() {
        loop {
            match renew_kind(cluster, &crd).await {
                Ok(0) => break,
                Ok(count) => {
                    tracing::info!(
                        kind = crd.spec.names.kind,
                        count,
                        "objects are stored as v1beta1 now"
                    );
                    break;
                }
                // The webhook may not be trusted yet; or the CRD is not installed.
                Err(why) => {
                    tracing::warn!(kind = crd.spec.names.kind, %why, "cannot renew stored objects yet");
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// How many objects were rewritten.
async fn renew_kind(cluster: &Cluster, ours: &CustomResourceDefinition) -> Result<usize, Error> {
    let crds: Api<Crd> = Api::all(cluster.client.clone());
    let name = ours.metadata.name.as_deref().unwrap_or_default();
    let there = write::get(&crds, name).await?;
    let stored = there.as_ref().map(Crd::stored_versions).unwrap_or_default();
    if stored.iter().all(|version| version == V1BETA1) {
        return Ok(0);
    }
    let count = rewrite_all(cluster, ours).await?;
    let trimmed = json!({ "status": { "storedVersions": [V1BETA1] } });
    write::patch_status_merge(&crds, name, &trimmed).await?;
    Ok(count)
}

async fn rewrite_all(cluster: &Cluster, ours: &CustomResourceDefinition) -> Result<usize, Error> {
    let names = &ours.spec.names;
    let resource = ApiResource {
        group: ours.spec.group.clone(),
        version: V1BETA1.to_owned(),
        api_version: format!("{}/{V1BETA1}", ours.spec.group),
        kind: names.kind.clone(),
        plural: names.plural.clone(),
    };
    let all: Api<DynamicObject> = Api::all_with(cluster.client.clone(), &resource);
    let (mut count, mut params) = (0, ListParams::default().limit(PAGE));
    loop {
        let page = write::list_metadata(&all, &resource, &params).await?;
        count += page.items.len();
        let next = page.metadata.continue_.filter(|next| !next.is_empty());
        stream::iter(page.items)
            .map(Ok)
            .try_for_each_concurrent(AT_A_TIME, |object| {
                let api: Api<DynamicObject> = match &object.metadata.namespace {
                    Some(namespace) => Api::namespaced_with(cluster.client.clone(), namespace, &resource),
                    None => all.clone(),
                };
                let resource = &resource;
                async move { rewrite(&api, resource, object.metadata).await }
            })
            .await?;
        let Some(next) = next else { return Ok(count) };
        params = params.continue_token(&next);
    }
}

/// The API server stores the object anew because its stored form changes, and without the entries that made it
/// convert the object at each write.
async fn rewrite(
    api: &Api<DynamicObject>,
    resource: &ApiResource,
    mut metadata: ObjectMeta,
) -> Result<(), Error> {
    for _ in 0..TRIES {
        let name = metadata.name.as_deref().unwrap_or_default();
        let outcome = write::patch_metadata(api, resource, name, &renewal(&metadata)).await;
        match outcome {
            Err(why) if why.conflict() => {}
            Err(why) if why.not_found() => return Ok(()),
            outcome => return outcome,
        }
        match write::get_metadata(api, resource, name).await? {
            Some(newer) => metadata = newer.metadata,
            None => return Ok(()),
        }
    }
    Err(Error::Transport(format!(
        "{} {} changed {TRIES} times while it was renewed",
        resource.kind,
        metadata.name.unwrap_or_default()
    )))
}

/// A patch of nothing, but for managed fields in the older version: at each write the API server converts the object
/// into each version that one of them speaks, and drops all of them where it cannot.
fn renewal(metadata: &ObjectMeta) -> Value {
    let old = format!("{GROUP}/{V1ALPHA1}");
    let all = metadata.managed_fields.as_deref().unwrap_or_default();
    let kept: Vec<_> = all
        .iter()
        .filter(|entry| entry.api_version.as_deref() != Some(&old))
        .collect();
    if kept.len() == all.len() {
        return json!({});
    }
    // An empty list would mean that nothing is said of them.
    let kept = if kept.is_empty() { json!([{}]) } else { json!(kept) };
    json!({ "metadata": { "managedFields": kept, "resourceVersion": metadata.resource_version } })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn metadata(versions: &[&str]) -> ObjectMeta {
        let entries: Vec<_> = versions
            .iter()
            .map(|version| json!({ "manager": "m", "apiVersion": format!("{GROUP}/{version}"), "fieldsV1": { "f:spec": {} } }))
            .collect();
        serde_json::from_value(json!({ "resourceVersion": "7", "managedFields": entries })).unwrap()
    }

    #[test]
    fn managed_fields_in_the_older_version_are_dropped() {
        assert_eq!(renewal(&metadata(&[])), json!({}));
        assert_eq!(renewal(&metadata(&["v1beta1"])), json!({}));
        let patch = renewal(&metadata(&["v1alpha1", "v1beta1"]));
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
        let kept = patch["metadata"]["managedFields"].as_array().unwrap();
        assert_eq!(
            (kept.len(), &kept[0]["apiVersion"]),
            (1, &json!("apps.kruise.io/v1beta1"))
        );
        assert_eq!(
            renewal(&metadata(&["v1alpha1"]))["metadata"]["managedFields"],
            json!([{}])
        );
    }
}
