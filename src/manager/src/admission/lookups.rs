//! Requests to the API server that answers depend on.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use futures::future::OptionFuture;
use futures::{StreamExt, future, stream};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Node, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::Api;
use kube::api::ListParams;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::body_limits::Quota;
use super::cloneset::PodOwnership;
use super::connections::Caller;
use super::container_recreate_request::{PodLookup, Target};
use super::deletion::{ClaimFields, DeletionBlocker, is_active_pod, is_bound_claim};
use super::pod::{self, PodInjectionLookup};
use super::previous_fields::PreviousFields;
use super::review::Request;
use super::sidecar_set::SidecarSetLookup;
use super::{Options, cloneset, sidecar_set};
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_api::sidecarset::{MAX_SET_BYTES, SidecarSet};
use kruise_api::validation::{MAX_VALUE_CHARS, truncate};
use kruise_api::{keys, names};
use kruise_cluster::pod_template::{self, Defaulting, DryRunResult, Templates};
use kruise_cluster::{self as cluster, Bounded, Cluster, Key, Store, write};
use kruise_ops::{FeatureGate, FeatureGates};
use kruise_workload::in_place::normalize::TemplateStorage;
use kruise_workload::sidecarset::hash::with_hashes;

/// Timeout of a read for an answer; the API server waits 10 s for us.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a short read; the API server waits 5 s for such a webhook.
const WARNING_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a dry run; the API server waits 5 s for such a webhook.
const DRY_RUN_TIMEOUT: Duration = Duration::from_secs(4);
/// Nodes that are looked up for a warning, and Pods that are looked up in parallel.
const MAX_CONCURRENT_LOOKUPS: usize = 16;
/// Total weight of concurrent requests to the API server; weights follow the memory that an answer may take, some MiB
/// each.
const MAX_REQUEST_WEIGHT: usize = 32;
/// The same for one client address.
const MAX_CLIENT_WEIGHT: usize = 16;
/// Weight of a request whose answer is an object's metadata, and of a dry run, whose review has permits for both.
const METADATA_WEIGHT: u32 = 2;
/// Weight of a request for a Pod.
const POD_WEIGHT: u32 = 4;
/// Weight of a request for a page of a list.
const LIST_WEIGHT: u32 = 16;
/// Page size of lists of a namespace.
const PAGE_SIZE: u32 = 50;
/// Maximum number of Pods that are looked up by name.
const MAX_PODS_TO_DELETE: usize = 500;

/// Number of objects of a page that match.
fn count_matching<T>(page: &[T], matches_filter: impl Fn(&T) -> bool) -> usize {
    page.iter().filter(|one| matches_filter(one)).count()
}

/// Number of matching objects of the first page that has any; 0 when no page has.
async fn count_first_page<F: Future<Output = Result<(usize, ListMeta), cluster::Error>>>(
    params: ListParams,
    list: impl Fn(ListParams) -> F,
) -> Result<usize, cluster::Error> {
    let mut params = params.limit(PAGE_SIZE);
    loop {
        let (count, page) = list(params.clone()).await?;
        match page.continue_.filter(|next| !next.is_empty()) {
            Some(next) if count == 0 => params = params.continue_token(&next),
            _ => return Ok(count),
        }
    }
}

/// Point in time until which an answer is needed.
#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    fn after(after: Duration) -> Self {
        let at = Instant::now() + after;
        Self { at, timeout: after }
    }
}

/// Reads from the API server for answers; clones share the cache.
#[derive(Clone)]
pub(super) struct Lookups {
    pub cluster: Cluster,
    gates: Arc<FeatureGates>,
    virtual_nodes: Store<()>,
    /// SidecarSets, and what their injection needs.
    sidecar_sets: Store<SidecarSet>,
    namespaces: Store<BTreeMap<String, String>>,
    sidecar_set_revisions: Store<ControllerRevision>,
    /// PodProbeMarkers, with gate `EnablePodProbeMarkerOnServerless`.
    probe_markers: Option<Store<PodProbeMarker>>,
    /// Until when a review waits for the first lists: a moment after the start. Later it fails at once.
    listed_by: Instant,
    /// Namespace of the program, with the revisions and the whitelist.
    namespace: String,
    request_quota: Quota,
    caller: IpAddr,
}

impl Lookups {
    /// Also returns the task that keeps the stores current. Of nodes only virtual ones are watched, of which there are
    /// few or none, so that an answer need not request the Pod's node. A watch that fails later, or is refused, must not
    /// take conversion and the other reviews out of service: the reviews that need it fail, or answer from what is cached.
    pub fn new(cluster: &Cluster, options: &Options) -> (Self, impl Future<Output = ()> + use<>) {
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        let params = ListParams::default().labels(&format!("{}={}", keys::TYPE, keys::TYPE_VIRTUAL_KUBELET));
        let (virtual_nodes, watching_nodes) = cluster.reflector_for_start(nodes, params, |_: Node| Some(()));
        let (sidecar_sets, watching_sets) = cluster.reflector_for_start(
            Api::all(cluster.client.clone()),
            ListParams::default(),
            |set: Bounded<SidecarSet, MAX_SET_BYTES>| Some(with_hashes(set.object)),
        );
        let (namespaces, watching_namespaces) = cluster.reflector_for_start(
            Api::all(cluster.client.clone()),
            ListParams::default(),
            |namespace: Namespace| Some(namespace.metadata.labels.unwrap_or_default()),
        );
        let (sidecar_set_revisions, watching_revisions) = cluster.reflector_for_start(
            Api::namespaced(cluster.client.clone(), &options.namespace),
            ListParams::default().labels(keys::SIDECAR_SET_NAME),
            |revision: Bounded<ControllerRevision, { 2 * MAX_SET_BYTES }>| Some(revision.object),
        );
        let is_enabled = options
            .gates
            .enabled(FeatureGate::EnablePodProbeMarkerOnServerless);
        let (probe_markers, watching_markers) = is_enabled
            .then(|| {
                cluster.optional_reflector(
                    Api::all(cluster.client.clone()),
                    ListParams::default(),
                    Some::<PodProbeMarker>,
                )
            })
            .unzip();
        let watching = async {
            tokio::join!(
                OptionFuture::from(watching_markers),
                watching_nodes,
                watching_sets,
                watching_namespaces,
                watching_revisions
            );
        };
        (
            Self {
                cluster: cluster.clone(),
                gates: Arc::new(options.gates.clone()),
                virtual_nodes,
                sidecar_sets,
                namespaces,
                sidecar_set_revisions,
                probe_markers,
                listed_by: Instant::now() + WARNING_TIMEOUT,
                namespace: options.namespace.clone(),
                request_quota: Quota::new(MAX_REQUEST_WEIGHT, MAX_CLIENT_WEIGHT),
                caller: Ipv4Addr::UNSPECIFIED.into(),
            },
            watching,
        )
    }

    /// The same with the quota of a client.
    pub fn on_behalf_of(&self, caller: &Caller) -> Self {
        Self {
            caller: caller.network,
            ..self.clone()
        }
    }

    /// The API server's answer, within the deadline and the request quota of this client.
    async fn bounded_request<T>(
        &self,
        (verb, kind, weight): (&'static str, &str, u32),
        Deadline { at, timeout: after }: Deadline,
        answer: impl Future<Output = Result<T, cluster::Error>>,
    ) -> Result<T, cluster::Error> {
        let kind = || kind.to_owned();
        let Ok(Ok(_permits)) = timeout_at(at, self.request_quota.acquire(self.caller, weight)).await else {
            let kind = kind();
            return Err(cluster::Error::TooManyInFlight { verb, kind, after });
        };
        match timeout_at(at, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(cluster::Error::Timeout {
                verb,
                kind: kind(),
                after,
            }),
        }
    }

    /// Whether no node has that name; false when that is unknown at the deadline.
    async fn is_missing_node(&self, nodes: &Api<Node>, name: &str, deadline: Deadline) -> bool {
        let get = write::get_partial::<_, IgnoredAny>(nodes, &(), name);
        matches!(
            self.bounded_request(("get", "Node", METADATA_WEIGHT), deadline, get)
                .await,
            Ok(None) | Err(cluster::Error::InvalidName { .. })
        )
    }

    /// The Pod of a new request, and whether its node is a virtual one.
    ///
    /// # Errors
    /// A message, when the API server gives no answer in time.
    pub async fn target_pod(&self, request: &Request) -> Result<PodLookup, String> {
        let name = request.object["spec"]["podName"].as_str().unwrap_or_default();
        if !names::is_subdomain(name) {
            return Ok(PodLookup::default());
        }
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), &request.namespace);
        let deadline = Deadline::after(READ_TIMEOUT);
        let synced = timeout_at(deadline.at, self.virtual_nodes.wait_until_synced()).await;
        synced.map_err(|_| format!("no answer within {READ_TIMEOUT:?}"))?;
        let get = write::get_as::<Target>(pods, name);
        let pod = self
            .bounded_request(("get", "Pod", POD_WEIGHT), deadline, get)
            .await;
        let pod = pod.map_err(|why| why.to_string())?;
        let pod = pod.transpose()?.map(Pod::from);
        let node = pod
            .as_ref()
            .and_then(|pod| pod.spec.as_ref()?.node_name.as_deref());
        let virtual_node =
            node.is_some_and(|node| self.virtual_nodes.get(&Key::cluster_scoped(node)).is_some());
        Ok(PodLookup { pod, virtual_node })
    }

    /// Nodes in a job's selector that do not exist; for a warning, so unanswered lookups are left out.
    pub async fn missing_nodes(&self, request: &Request) -> Vec<String> {
        let named = request.object["spec"]["selector"]["names"].as_array();
        let node_names = named
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .take(MAX_CONCURRENT_LOOKUPS);
        let nodes: Api<Node> = Api::all(self.cluster.client.clone());
        let deadline = Deadline::after(WARNING_TIMEOUT);
        let lookups = node_names.map(|name| {
            let nodes = &nodes;
            async move {
                let missing = self.is_missing_node(nodes, name, deadline).await;
                missing.then(|| truncate(name, MAX_VALUE_CHARS).into_owned())
            }
        });
        let all = future::join_all(lookups).await;
        all.into_iter().flatten().collect()
    }

    /// The API server's result for the templates of a CloneSet, if they are new.
    pub async fn default_templates(&self, request: &Request) -> Option<Result<DryRunResult, cluster::Error>> {
        let templates = cloneset::changed_templates(request)?;
        // One deadline for both requests: the timeout of the webhook is not much longer.
        let deadline = Deadline::after(DRY_RUN_TIMEOUT);
        let answer = self
            .dry_run_templates(request, &request.namespace, templates, deadline)
            .await;
        let Ok(DryRunResult::Valid {
            unknown_fields: unknown,
            ..
        }) = &answer
        else {
            return Some(answer);
        };
        if !request.strict || unknown.is_empty() {
            return Some(answer);
        }
        let previous = PreviousFields::from_request(request);
        if previous.filter_new(unknown).is_empty() {
            return Some(answer);
        }
        let misspelled = self.misspelled_fields(request, deadline).await;
        let why = misspelled
            .ok()
            .and_then(|fields| cloneset::strict_decoding_error(&previous, &fields));
        // Without an answer the user gets a warning.
        Some(why.map_or(answer, |why| Ok(DryRunResult::Invalid(why))))
    }

    async fn misspelled_fields(
        &self,
        request: &Request,
        deadline: Deadline,
    ) -> Result<Vec<String>, cluster::Error> {
        let templates =
            self.with_workload_metadata(request, Templates::from_workload_spec(&request.object["spec"]));
        let fields = pod_template::find_unknown_fields(&self.cluster, &request.namespace, templates);
        self.bounded_request(
            ("create", "PodTemplate", METADATA_WEIGHT),
            deadline,
            Box::pin(fields),
        )
        .await
    }

    /// The Pod template that an update replaces, as the API server would store it now, when only in-place updates are
    /// allowed.
    pub async fn in_place_baseline(&self, request: &Request) -> Option<cloneset::InPlaceBaseline> {
        let old = &request.old.as_ref()?["spec"];
        if !cloneset::is_in_place_only(&request.object)
            || old["template"] == request.object["spec"]["template"]
        {
            return None;
        }
        let deadline = Deadline::after(DRY_RUN_TIMEOUT);
        let template = match self
            .dry_run_templates(
                request,
                &request.namespace,
                Templates::from_workload_spec(old),
                deadline,
            )
            .await
        {
            Ok(DryRunResult::Valid { templates, .. }) => templates.template,
            _ => old["template"].clone(),
        };
        Some(cloneset::InPlaceBaseline {
            template,
            stored: TemplateStorage::from_gate(Defaulting::from_gates(&self.gates).disabled),
            vertical_scaling: self.gates.enabled(FeatureGate::InPlaceWorkloadVerticalScaling),
        })
    }

    async fn wait_for_sidecar_sets(&self) -> Result<(), String> {
        let synced = async {
            tokio::join!(
                self.sidecar_sets.wait_until_synced(),
                self.namespaces.wait_until_synced(),
                self.sidecar_set_revisions.wait_until_synced(),
            )
        };
        match timeout_at(self.listed_by, synced).await {
            Ok(_) => Ok(()),
            Err(_) => Err("SidecarSets, Namespaces and ControllerRevisions are not listed yet".to_owned()),
        }
    }

    /// The sets and what their injection into a new Pod needs; `set` is the one whose webhook was called.
    ///
    /// # Errors
    /// A message, when they are not known yet, or the labels of the Pod's Namespace are not and this set selects by them.
    pub async fn pod_injection(
        &self,
        request: &Request,
        set: Option<&str>,
    ) -> Result<PodInjectionLookup, String> {
        self.wait_for_sidecar_sets().await?;
        if let Some(set) = set {
            self.check_set_is_cached(set).await?;
        }
        let namespace = Key::cluster_scoped(request.namespace.clone());
        let (mut sets, namespace_labels) = (self.sidecar_sets.list(), self.namespaces.get(&namespace));
        if namespace_labels.is_none() && !pod::remove_undecided(request, &mut sets, set) {
            // Otherwise the Pod would be admitted despite `Fail`.
            return Err(format!("Namespace {} is not known here yet", request.namespace));
        }
        Ok(PodInjectionLookup {
            sets,
            probe_markers: self.probe_markers_of(&request.namespace).await,
            namespace_labels,
            revisions: self.sidecar_set_revisions.list(),
            readiness_gate_for_all: self.gates.enabled(FeatureGate::KruisePodReadinessGate),
            enhanced_liveness: self.gates.enabled(FeatureGate::EnhancedLivenessProbe),
            sort_containers: self.gates.enabled(FeatureGate::EnableSortSidecarContainerByName),
        })
    }

    /// PodProbeMarkers of a namespace, sorted by name. While they are not listed yet there are none: Pods are created
    /// without probes rather than not at all.
    async fn probe_markers_of(&self, namespace: &str) -> Vec<Arc<PodProbeMarker>> {
        let Some(markers) = &self.probe_markers else {
            return Vec::new();
        };
        if timeout_at(self.listed_by, markers.wait_until_synced())
            .await
            .is_err()
        {
            tracing::warn!(
                namespace,
                "PodProbeMarkers are not listed yet; a new Pod may lack their probes"
            );
        }
        let mut entries = markers.entries_of(Some(namespace));
        entries.sort_by(|(one, _), (other, _)| one.cmp(other));
        entries.into_iter().map(|(_, marker)| marker).collect()
    }

    /// Fails if the set exists and the watch has not shown it yet, so that its failure policy decides. One that does not
    /// exist is deleted, and its webhook will be.
    async fn check_set_is_cached(&self, name: &str) -> Result<(), String> {
        let cached = self.sidecar_sets.get(&Key::cluster_scoped(name)).is_some();
        // No other set has a webhook.
        if cached || !names::is_label(name) {
            return Ok(());
        }
        let sets: Api<SidecarSet> = Api::all(self.cluster.client.clone());
        let get = write::get_partial::<_, IgnoredAny>(&sets, &(), name);
        let deadline = Deadline::after(WARNING_TIMEOUT);
        let found = self.bounded_request(("get", "SidecarSet", METADATA_WEIGHT), deadline, get);
        match found.await.map_err(|why| why.to_string())? {
            Some(_) => Err(format!(
                "SidecarSet {name} is not known here yet, or is larger than {MAX_SET_BYTES} bytes"
            )),
            None => Ok(()),
        }
    }

    /// What the validation of a SidecarSet needs.
    ///
    /// # Errors
    /// A message, when the API server gives no answer in time.
    pub async fn sidecar_set(&self, request: &Request) -> Result<SidecarSetLookup, String> {
        let deadline = Deadline::after(DRY_RUN_TIMEOUT);
        self.wait_for_sidecar_sets().await?;
        let mut lookup = SidecarSetLookup {
            stored: self.sidecar_sets.list(),
            patch_metadata_allowed: self
                .gates
                .enabled(FeatureGate::SidecarSetPatchPodMetadataDefaultsAllowed),
            ..SidecarSetLookup::default()
        };
        if sidecar_set::names_revision(request) {
            lookup.revisions = self.sidecar_set_revisions.list();
        }
        if sidecar_set::patches_metadata(request) {
            let api: Api<ConfigMap> = Api::namespaced(self.cluster.client.clone(), &self.namespace);
            let get = write::get(&api, keys::CONFIGURATION);
            let map = self
                .bounded_request(("get", "ConfigMap", METADATA_WEIGHT), deadline, get)
                .await;
            let data = map.map_err(|why| why.to_string())?.and_then(|map| map.data);
            lookup.whitelist = data.and_then(|mut data| data.remove(keys::PATCH_POD_METADATA_WHITELIST));
        }
        Ok(lookup)
    }

    /// What the API server says about the containers and volumes of a SidecarSet, if they are new: as those of a Pod of
    /// our own namespace, because a set has none.
    pub async fn dry_run_sidecars(&self, request: &Request) -> Option<Result<DryRunResult, cluster::Error>> {
        let templates = sidecar_set::changed_pod(request)?;
        let deadline = Deadline::after(DRY_RUN_TIMEOUT);
        Some(
            self.dry_run_templates(request, &self.namespace, templates, deadline)
                .await,
        )
    }

    /// Why a protected Namespace cannot be deleted.
    ///
    /// # Errors
    /// When there is no answer in time: the kind that could not be listed.
    pub async fn deletion_blocker(
        &self,
        namespace: &str,
    ) -> Result<Option<DeletionBlocker>, (&'static str, cluster::Error)> {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), namespace);
        let params = ListParams::default().fields("status.phase!=Succeeded,status.phase!=Failed");
        let deadline = Deadline::after(DRY_RUN_TIMEOUT);
        let list_active = |params| {
            let pods = &pods;
            async move {
                let list = write::list_metadata(pods, &(), &params);
                let page = self
                    .bounded_request(("list", "Pod", LIST_WEIGHT), deadline, list)
                    .await?;
                Ok((
                    count_matching(&page.items, |pod| is_active_pod(&pod.metadata)),
                    page.metadata,
                ))
            }
        };
        let active = count_first_page(params, list_active).await;
        match active.map_err(|why| ("pods", why))? {
            0 => {}
            count => return Ok(Some(DeletionBlocker::Pods(count))),
        }
        let deadline = Deadline::after(DRY_RUN_TIMEOUT);
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.cluster.client.clone(), namespace);
        let list_bound = |params| {
            let claims = &claims;
            async move {
                let list = write::list::<ClaimFields>(claims, &params);
                let kind = "PersistentVolumeClaim";
                let page = self
                    .bounded_request(("list", kind, LIST_WEIGHT), deadline, list)
                    .await?;
                Ok((count_matching(&page.items, is_bound_claim), page.metadata))
            }
        };
        let bound = count_first_page(ListParams::default(), list_bound).await;
        Ok(Some(bound.map_err(|why| ("pvc", why))?)
            .filter(|count| *count > 0)
            .map(DeletionBlocker::Claims))
    }

    /// Adds the workload's labels and annotations to the templates, because admission policies may require them.
    fn with_workload_metadata(&self, request: &Request, templates: Templates) -> Templates {
        let metadata = &request.object["metadata"];
        Templates {
            labels: metadata["labels"].clone(),
            annotations: metadata["annotations"].clone(),
            ..templates
        }
    }

    async fn dry_run_templates(
        &self,
        request: &Request,
        namespace: &str,
        templates: Templates,
        deadline: Deadline,
    ) -> Result<DryRunResult, cluster::Error> {
        let templates = self.with_workload_metadata(request, templates);
        let answer = pod_template::dry_run(
            &self.cluster,
            namespace,
            templates,
            Defaulting::from_gates(&self.gates),
        );
        self.bounded_request(
            ("create", "PodTemplate", METADATA_WEIGHT),
            deadline,
            Box::pin(answer),
        )
        .await
    }

    /// Names newly in `podsToDelete` that no Pod of the CloneSet has; unanswered lookups are left out.
    pub async fn missing_pods_to_delete(&self, request: &Request) -> Vec<String> {
        let text = |field: &str| {
            request.object["metadata"][field]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let set = Owner {
            kind: OwnerKind::CloneSet,
            name: text("name"),
            uid: text("uid"),
        };
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), &request.namespace);
        let names = cloneset::added_pods_to_delete(request)
            .into_iter()
            .take(MAX_PODS_TO_DELETE);
        let names: Vec<String> = names.map(str::to_owned).collect();
        let deadline = Deadline::after(WARNING_TIMEOUT);
        let lookups = names.into_iter().map(|name| {
            let (pods, set) = (&pods, &set);
            async move {
                let get = write::get_partial(pods, &(), &name);
                let pod: Option<PodOwnership> = match self
                    .bounded_request(("get", "Pod", METADATA_WEIGHT), deadline, get)
                    .await
                {
                    Err(cluster::Error::InvalidName { .. }) => None,
                    found => found.ok()?,
                };
                let controlled = pod.is_some_and(|pod| cloneset::is_controlled_by(set, &pod));
                (!controlled).then(|| truncate(&name, MAX_VALUE_CHARS).into_owned())
            }
        });
        let missing = stream::iter(lookups).buffer_unordered(MAX_CONCURRENT_LOOKUPS);
        let in_time = missing.take_until(sleep_until(deadline.at));
        let mut missing: Vec<String> = in_time.filter_map(future::ready).collect().await;
        missing.sort_unstable();
        missing
    }
}
