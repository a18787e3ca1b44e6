//! Takes over what another installation stored in the older version.
//!
//! While an object is stored as v1alpha1 each read of it needs our conversion webhook. So the leader
//! writes each once more, unchanged, which stores it as v1beta1, and then strikes v1alpha1 from the CRD's
//! list of stored versions.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionNames as Names,
};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::DynamicObject;
use kube::discovery::ApiResource;
use serde_json::json;

use super::crd::Crd;
use crate::api::{self, V1BETA1};
use crate::cluster::{Cluster, Error, write};

const PAGE: u32 = 500;
const AT_A_TIME: usize = 8;
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
        let page = within("list", names, all.list_metadata(&params)).await?;
        count += page.items.len();
        let next = page.metadata.continue_.filter(|next| !next.is_empty());
        stream::iter(page.items)
            .map(Ok)
            .try_for_each_concurrent(AT_A_TIME, |object| {
                let metadata = object.metadata;
                let api: Api<DynamicObject> = match &metadata.namespace {
                    Some(namespace) => Api::namespaced_with(cluster.client.clone(), namespace, &resource),
                    None => all.clone(),
                };
                async move { rewrite(&api, names, metadata.name.as_deref().unwrap_or_default()).await }
            })
            .await?;
        let Some(next) = next else { return Ok(count) };
        params = params.continue_token(&next);
    }
}

/// A patch of nothing; the API server stores the object anew because its stored form changes.
async fn rewrite(api: &Api<DynamicObject>, names: &Names, name: &str) -> Result<(), Error> {
    let nothing = json!({});
    let (params, patch) = (PatchParams::default(), Patch::Merge(&nothing));
    match within("patch", names, api.patch_metadata(name, &params, &patch)).await {
        // Gone, or written by somebody else in the meantime: either will do.
        Err(why) if why.not_found() || why.conflict() => Ok(()),
        outcome => outcome.map(drop),
    }
}

async fn within<T>(
    verb: &'static str,
    names: &Names,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match tokio::time::timeout(write::DEADLINE, call).await {
        Ok(answer) => answer.map_err(Error::from),
        Err(_) => Err(Error::Timeout {
            verb,
            kind: names.kind.clone(),
            after: write::DEADLINE,
        }),
    }
}
