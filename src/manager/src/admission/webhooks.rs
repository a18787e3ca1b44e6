//! The webhook configurations, and how the API server trusts and reaches us.
//!
//! [`kruise_api::webhooks`] generates them, and they are installed without `clientConfig`'s `caBundle`. The manager
//! sets it, in the CRDs too, whenever it is missing or old. Webhooks in our configurations that are not ours are
//! leftovers of another installation: they are removed, because they would fail closed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures::FutureExt;
use futures::stream::{self, Stream, StreamExt};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use super::bundle::Bundle;
use super::crd::Crd;
use super::{Options, storage_migration};
use kruise_api::backoff::Backoff;
use kruise_api::json::set;
use kruise_api::pod_probe_marker::{PodContainerProbe, PodProbeMarker};
use kruise_api::pod_webhooks::{
    NAME_SUFFIX, SetWebhook, VIRTUAL_NODE_PROBES, enhanced_liveness_webhook, launch_priority_webhook,
    pod_webhooks, readiness_gate_webhook, virtual_node_probes_webhook,
};
use kruise_api::sidecarset::SidecarSet;
use kruise_api::webhooks::{MUTATING, VALIDATING, configurations, without_nulls};
use kruise_api::{Kind, keys};
use kruise_cluster::write::{self, Object};
use kruise_cluster::{Cluster, Error, Key, Store};
use kruise_ops::panics::catch_panic;
use kruise_ops::{FeatureGate, Progress};

/// After a patch that failed, or whose plan panicked.
const RETRY: Duration = Duration::from_secs(5);
/// The pauses before a patch that another client has undone is repeated, and how long it is remembered.
const UNDONE_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
const UNDONE_MEMORY: Duration = Duration::from_secs(600);
/// Changes of SidecarSets within this time are written together.
const BATCH_WINDOW: Duration = Duration::from_millis(100);

/// How the API server reaches `path` of our server.
fn client_config(options: &Options, ca: &str, path: &str) -> Value {
    let ca = BASE64_STANDARD.encode(ca);
    match &options.host {
        Some(host) => {
            let host = if host.contains(':') {
                format!("[{host}]")
            } else {
                host.clone()
            };
            let url = format!("https://{host}:{}{path}", options.port);
            json!({ "url": url, "service": null, "caBundle": ca })
        }
        None => {
            let (namespace, name) = (&options.namespace, keys::WEBHOOK_SERVICE);
            let service = json!({ "namespace": namespace, "name": name, "path": path, "port": 443 });
            json!({ "service": service, "url": null, "caBundle": ca })
        }
    }
}

/// The path of a URL with a host, such as `/mutate-pod/a`.
fn url_path(url: &str) -> Option<&str> {
    let (_, after_scheme) = url.split_once("://")?;
    after_scheme.get(after_scheme.find('/')?..)
}

/// The merge patch from `existing` (a configuration's `webhooks`) to ours; `None` when they are equal. `for_pods` are
/// the webhooks of SidecarSets; while these are unknown, existing ones are kept.
fn plan_configuration(
    existing: &Value,
    ours: &Value,
    for_pods: Option<&[Value]>,
    options: &Options,
    ca: &str,
) -> Option<Value> {
    let existing = existing.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut desired = Vec::new();
    let is_for_pods = |hook: &&Value| {
        hook["name"]
            .as_str()
            .is_some_and(|name| name.ends_with(NAME_SUFFIX))
    };
    let for_pods: Vec<_> = match for_pods {
        Some(for_pods) => for_pods.iter().collect(),
        None => existing.iter().filter(is_for_pods).collect(),
    };
    for ours in ours["webhooks"].as_array().into_iter().flatten().chain(for_pods) {
        // Existing fields that ours do not set are kept, such as selectors that a user added. Those for Pods have the
        // selectors of their sets alone.
        let mut hook = Value::Null;
        if !is_for_pods(&ours) {
            let there = existing.iter().find(|one| one["name"] == ours["name"]);
            hook = there.cloned().unwrap_or_default();
        }
        let timeout = hook["timeoutSeconds"].clone();
        json_patch::merge(&mut hook, ours);
        if timeout.is_number() {
            // A value of the Helm chart.
            set(&mut hook, &["timeoutSeconds"], timeout);
        }
        // What is kept may have a URL instead.
        let there = &ours["clientConfig"];
        let path = there["service"]["path"].as_str();
        let path = path.or_else(|| url_path(there["url"].as_str()?));
        let path = path.unwrap_or(keys::MUTATE_POD_PATH);
        set(
            &mut hook,
            &["clientConfig"],
            without_nulls(client_config(options, ca, path)),
        );
        desired.push(hook);
    }
    (existing != desired).then(|| json!({ "webhooks": desired }))
}

/// The merge patch that points a CRD's `spec.conversion` to us; `None` when it does.
fn plan_conversion(existing: &Value, options: &Options, ca: &str) -> Option<Value> {
    let desired = client_config(options, ca, keys::CONVERT_PATH);
    let up_to_date = existing["strategy"] == "Webhook"
        && existing["webhook"]["clientConfig"] == without_nulls(desired.clone())
        && existing["webhook"]["conversionReviewVersions"] == json!(["v1"]);
    let webhook = json!({ "clientConfig": desired, "conversionReviewVersions": ["v1"] });
    (!up_to_date).then(|| json!({ "spec": { "conversion": { "strategy": "Webhook", "webhook": webhook } } }))
}

/// Keeps configurations and CRDs current while we lead. Ends with the process.
pub(super) async fn run_registration(
    cluster: &Cluster,
    options: &Options,
    bundle: watch::Receiver<Bundle>,
    mut leading: watch::Receiver<bool>,
    progress: &Progress,
) {
    // When the sender is dropped, the process is terminating.
    while leading.wait_for(|leading| *leading).await.is_ok() {
        let lost_lead = async { leading.wait_for(|leading| !*leading).await.is_ok() };
        tokio::select! {
            () = sync_all(cluster, options, &bundle, progress) => {}
            _ = lost_lead => {}
        }
    }
}

/// Keeps configurations and CRDs current. Never returns.
async fn sync_all(
    cluster: &Cluster,
    options: &Options,
    bundle: &watch::Receiver<Bundle>,
    progress: &Progress,
) {
    let [mutating, validating] = configurations(&options.namespace);
    let namespace = options.namespace.clone();
    let sets: Api<SidecarSet> = Api::all(cluster.client.clone());
    let (sets, watching_sets) =
        cluster.optional_reflector(sets, ListParams::default(), move |set: SidecarSet| {
            let (name, annotations) = (set.metadata.name.as_deref()?, set.metadata.annotations.as_ref());
            let webhook = SetWebhook::new(&namespace, name, annotations, &set.spec)?;
            Some(webhook.with_policy(set.has_policy()))
        });
    let enabled = |gate| options.gates.enabled(gate);
    let markers: Api<PodProbeMarker> = Api::all(cluster.client.clone());
    let (markers, watching_markers) =
        cluster.optional_reflector(markers, ListParams::default(), |marker: PodProbeMarker| {
            let mut probes = marker.spec.probes.iter();
            probes.find_map(PodContainerProbe::condition_type).map(drop)
        });
    let has_markers = enabled(FeatureGate::EnablePodProbeMarkerOnServerless);
    let changes = stream::select(
        changes_of(&sets).boxed(),
        if has_markers {
            changes_of(&markers).boxed()
        } else {
            stream::pending().boxed()
        },
    );
    let plan_mutating = |there: &Value, ca: &str| {
        let all = sets.list();
        let pods = enabled(FeatureGate::PodWebhook);
        let mut for_all = Vec::new();
        if pods {
            for_all.push(launch_priority_webhook(&options.namespace));
        }
        if enabled(FeatureGate::KruisePodReadinessGate) {
            for_all.push(readiness_gate_webhook(&options.namespace));
        }
        if enabled(FeatureGate::EnhancedLivenessProbe) {
            for_all.push(enhanced_liveness_webhook(&options.namespace));
        }
        let with_markers = markers.entries().into_iter().filter_map(|(key, _)| key.namespace);
        let with_markers: BTreeSet<String> = with_markers.collect();
        if !with_markers.is_empty() {
            for_all.push(virtual_node_probes_webhook(&options.namespace, &with_markers));
        }
        if has_markers && !markers.is_synced() {
            // The kind, or the role to list it, may be missing; the other webhooks do not wait for it.
            let existing = there.as_array().into_iter().flatten();
            let name = format!("{VIRTUAL_NODE_PROBES}{NAME_SUFFIX}");
            for_all.extend(existing.filter(|hook| hook["name"] == *name).cloned());
        }
        let of_sets = all.iter().map(Arc::as_ref).filter(|_| pods);
        let for_pods = pod_webhooks(&options.namespace, of_sets, for_all);
        let for_pods = sets.is_synced().then_some(for_pods.as_slice());
        plan_configuration(there, &mutating, for_pods, options, ca)
    };
    let plan_validating = |there: &Value, ca: &str| plan_configuration(there, &validating, None, options, ca);
    let conversion = |there: &Value, ca: &str| plan_conversion(there, options, ca);
    let crds = Kind::ALL.into_iter().filter(|kind| kind.info().needs_conversion);
    let crds = crds.map(async |kind| {
        let name = kind.crd_name();
        let pointer = "/spec/conversion";
        let changes = stream::pending();
        sync_object::<Crd>(
            cluster,
            &name,
            pointer,
            conversion,
            changes,
            bundle.clone(),
            progress,
        )
        .await;
    });
    tokio::join!(
        sync_object::<MutatingWebhookConfiguration>(
            cluster,
            MUTATING,
            "/webhooks",
            plan_mutating,
            changes,
            bundle.clone(),
            progress,
        ),
        sync_object::<ValidatingWebhookConfiguration>(
            cluster,
            VALIDATING,
            "/webhooks",
            plan_validating,
            stream::pending(),
            bundle.clone(),
            progress,
        ),
        futures::future::join_all(crds),
        watching_sets,
        async {
            if has_markers {
                watching_markers.await;
            }
        },
        storage_migration::migrate_all(cluster),
    );
}

/// Yields for each change of the store, and when it is synced: that there is no object is news, too.
fn changes_of<T: Send + Sync + 'static>(store: &Store<T>) -> impl Stream<Item = ()> + Send + use<T> {
    let mut changes = store.subscribe();
    let changes = stream::poll_fn(move |cx| changes.poll_recv(cx).map(|change| change.map(drop)));
    let store = store.clone();
    let synced = stream::once(async move { store.wait_until_synced().await });
    stream::select(changes, Box::pin(synced))
}

/// Patches that another client undoes: both must not write as fast as they can.
#[derive(Default)]
struct UndonePatches {
    /// The last patch and its time.
    last: Option<(Value, Instant)>,
    /// How often it was repeated.
    repeats: u32,
}

impl UndonePatches {
    /// A patch was sent; returns the pause before the next one if it is the last one again.
    fn record(&mut self, patch: &Value, now: Instant) -> Option<Duration> {
        let last = self.last.replace((patch.clone(), now));
        let is_same = last.is_some_and(|(last, at)| last == *patch && now - at < UNDONE_MEMORY);
        let pause = is_same.then(|| UNDONE_BACKOFF.delay(self.repeats));
        self.repeats = if is_same {
            self.repeats.saturating_add(1)
        } else {
            0
        };
        pause
    }
}

/// Watches the part at `pointer` of the object with that name, and applies the patch of `plan`, whose other inputs
/// `changes` announces.
async fn sync_object<K: Object + Send + Sync + 'static>(
    cluster: &Cluster,
    name: &str,
    pointer: &'static str,
    plan: impl Fn(&Value, &str) -> Option<Value>,
    mut changes: impl Stream<Item = ()> + Unpin,
    mut bundle: watch::Receiver<Bundle>,
    progress: &Progress,
) {
    let api: Api<K> = Api::all(cluster.client.clone());
    let params = ListParams::default().fields(&format!("metadata.name={name}"));
    let (store, watching) = cluster.optional_reflector(api.clone(), params, move |object: K| {
        let object = serde_json::to_value(object).ok()?;
        Some(object.pointer(pointer).cloned().unwrap_or_default())
    });
    let key = Key::cluster_scoped(name);
    let sync = async {
        let step = progress.begin_idle(super::HEALTH_CHECK);
        let mut object_changes = store.subscribe();
        store.wait_until_synced().await;
        let mut was_there = true;
        // The last patch, until its result is in the store.
        let mut applied = None;
        let mut undone = UndonePatches::default();
        loop {
            let is_there = store.get(&key).is_some();
            if was_there && !is_there {
                tracing::warn!(name, kind = %K::kind(&()), "not found; apply deploy/webhooks and deploy/crds");
            }
            was_there = is_there;
            let ca = bundle.borrow_and_update().ca.clone();
            step.set_activity(format!("patching {name}"), write::REQUEST_TIMEOUT);
            let patched = async {
                let patch = store.get(&key).and_then(|there| plan(&there, &ca));
                let patch = patch.filter(|patch| applied.as_ref() != Some(patch));
                if let Some(patch) = &patch {
                    write::patch_merge(&api, name, patch).await?;
                }
                Ok(patch)
            };
            let result = catch_panic(super::HEALTH_CHECK, name, patched).await;
            let mut pause = None;
            let retry = match result.map_err(Error::from).flatten() {
                Ok(patch) => {
                    pause = patch
                        .as_ref()
                        .and_then(|patch| undone.record(patch, Instant::now()));
                    applied = patch.or(applied);
                    std::future::pending().left_future()
                }
                Err(why) => {
                    tracing::warn!(name, kind = %K::kind(&()), %why, "cannot point the API server at our webhooks");
                    tokio::time::sleep(RETRY).right_future()
                }
            };
            step.set_idle(None);
            if let Some(pause) = pause {
                tracing::warn!(name, kind = %K::kind(&()), ?pause, "another client undoes our changes; waiting before the next");
            }
            let changed_later = async {
                tokio::time::sleep(pause.unwrap_or_default()).await;
                object_changes.recv().await
            };
            tokio::select! {
                _ = changed_later => applied = None,
                Some(()) = changes.next() => {
                    // Of many sets that are applied together, one patch tells.
                    tokio::time::sleep(BATCH_WINDOW).await;
                    while changes.next().now_or_never().flatten().is_some() {}
                }
                _ = bundle.changed() => {}
                () = retry => {}
            }
        }
    };
    tokio::join!(watching, sync);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use std::sync::atomic::{AtomicBool, Ordering};

    use kube::client::Body;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::*;
    use kruise_ops::FeatureGates;
    use kruise_ops::logs::captured_lines;
    use kruise_ops::panics::injected::inject_panic;

    /// Applies the patches of `plan` to the validating configuration.
    async fn sync_validating(client: kube::Client, plan: impl Fn(&Value, &str) -> Option<Value>) {
        let cluster = Cluster::from_client(client);
        let bundle = Bundle::generate(&["a".to_owned()].into(), jiff::Timestamp::UNIX_EPOCH).unwrap();
        let (_bundle_tx, bundle) = watch::channel(bundle);
        let progress = Progress::default();
        sync_object::<ValidatingWebhookConfiguration>(
            &cluster,
            VALIDATING,
            "/webhooks",
            plan,
            stream::pending(),
            bundle,
            &progress,
        )
        .await;
    }

    /// The plan of one configuration panics, for example because of one SidecarSet: it is planned again later.
    #[tokio::test(start_paused = true)]
    async fn panicking_plan_is_retried_after_a_pause() {
        let (patched_tx, mut patched) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let patched_tx = patched_tx.clone();
            async move {
                if request
                    .uri()
                    .query()
                    .is_some_and(|query| query.contains("watch=true"))
                {
                    std::future::pending::<()>().await;
                }
                let object =
                    json!({ "metadata": { "name": VALIDATING, "resourceVersion": "1" }, "webhooks": [] });
                let response = match *request.method() {
                    http::Method::PATCH => {
                        patched_tx.send(()).unwrap();
                        object
                    }
                    _ => json!({ "metadata": { "resourceVersion": "1" }, "items": [object] }),
                };
                http::Response::builder().body(Body::from(response.to_string().into_bytes()))
            }
        });
        let client = kube::Client::new(service, "default");
        let sync = sync_validating(client, |_, _| Some(json!({ "webhooks": [{}] })));
        let panics = inject_panic(super::super::HEALTH_CHECK, VALIDATING);
        let check = async {
            let started = Instant::now();
            // The second one is at once: the first event of the watch is a change.
            panics.wait_for(4).await;
            assert!(started.elapsed() >= 2 * RETRY, "{:?}", started.elapsed());
            assert!(patched.try_recv().is_err());
            drop(panics);
            timeout(Duration::from_secs(600), patched.recv())
                .await
                .unwrap()
                .unwrap();
        };
        tokio::select! {
            () = sync => panic!("it ended"),
            () = check => {}
        }
    }

    /// The API server has the object until its first watch event.
    async fn sync_deleted_object() {
        let is_deleted = AtomicBool::new(false);
        let is_deleted = &*Box::leak(Box::new(is_deleted));
        let service = tower::service_fn(move |request: http::Request<Body>| async move {
            let object = json!({ "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
                "metadata": { "name": VALIDATING, "resourceVersion": "2" }, "webhooks": [] });
            let is_watch = request
                .uri()
                .query()
                .is_some_and(|query| query.contains("watch=true"));
            let was_deleted = is_deleted.load(Ordering::Relaxed);
            if is_watch && was_deleted {
                std::future::pending::<()>().await;
            }
            let response = if is_watch {
                is_deleted.store(true, Ordering::Relaxed);
                // In the API server's format: the type first.
                format!("{{\"type\":\"DELETED\",\"object\":{object}}}")
            } else {
                let items: Vec<_> = Some(object).filter(|_| !was_deleted).into_iter().collect();
                json!({ "metadata": { "resourceVersion": "1" }, "items": items }).to_string()
            };
            http::Response::builder().body(Body::from(format!("{response}\n").into_bytes()))
        });
        let sync = sync_validating(kube::Client::new(service, "default"), |_, _| None);
        timeout(Duration::from_secs(60), sync).await.unwrap_err();
        assert!(is_deleted.load(Ordering::Relaxed));
    }

    #[test]
    fn configuration_that_is_deleted_is_logged() {
        let lines = captured_lines(|| {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().start_paused(true).build().unwrap();
            runtime.block_on(sync_deleted_object());
        });
        let reports = lines.iter().filter(|line| line.contains("not found; apply"));
        assert_eq!(reports.count(), 1, "{lines:?}");
    }

    fn options(host: Option<&str>) -> Options {
        Options {
            serve: true,
            manage: true,
            namespace: "ns".into(),
            host: host.map(str::to_owned),
            port: 9443,
            gates: FeatureGates::default(),
        }
    }

    fn merged(mut object: Value, patch: &Value) -> Value {
        json_patch::merge(&mut object, patch);
        object
    }

    /// One patch is enough for any existing state and any way to reach us.
    #[test]
    fn caller_config_converges_in_one_patch() {
        for ours in configurations(keys::SYSTEM_NAMESPACE) {
            let foreign = json!({ "webhooks": [
                { "name": "mpod.kb.io", "failurePolicy": "Fail" },
                { "name": ours["webhooks"][0]["name"], "failurePolicy": "Fail", "namespaceSelector": { "matchLabels": { "a": "b" } },
                  "clientConfig": { "url": "https://old", "caBundle": "eA==" } },
            ] });
            for existing in [json!({ "webhooks": [] }), ours.clone(), foreign] {
                for options in [options(None), options(Some("127.0.0.1"))] {
                    let patch = plan_configuration(&existing["webhooks"], &ours, None, &options, "ca")
                        .expect("a patch");
                    let after = merged(existing.clone(), &patch);
                    assert_eq!(
                        plan_configuration(&after["webhooks"], &ours, None, &options, "ca"),
                        None
                    );
                    assert!(plan_configuration(&after["webhooks"], &ours, None, &options, "new").is_some());
                    assert!(!after.to_string().contains("mpod"), "a foreign webhook is left");
                }
            }
        }
    }

    #[test]
    fn webhooks_of_sets_are_kept_until_sets_are_known() {
        let [ours, _] = configurations(keys::SYSTEM_NAMESPACE);
        let spec = json!({ "selector": { "matchLabels": { "a": "b" } } });
        let set = SetWebhook::new("ns", "s", None, &serde_json::from_value(spec).unwrap()).unwrap();
        let for_pods = pod_webhooks("ns", [&set], Vec::new());
        let plan = |existing: &Value, for_pods| {
            let patch = plan_configuration(existing, &ours, for_pods, &options(None), "ca");
            patch.map(|patch| patch["webhooks"].clone())
        };
        let with_set = plan(&json!([]), Some(&for_pods)).unwrap();
        let last = with_set.as_array().unwrap().last().unwrap();
        assert_eq!(last["name"], "s.mpod.kb.io");
        assert_eq!(last["clientConfig"]["service"]["path"], "/mutate-pod/s");
        assert_eq!(plan(&with_set, None), None);
        assert_eq!(plan(&with_set, Some(&for_pods)), None);
        let by_url = options(Some("::1"));
        let patch = plan_configuration(&with_set, &ours, None, &by_url, "ca").unwrap();
        let with_set_by_url = &patch["webhooks"];
        for for_pods in [None, Some(for_pods.as_slice())] {
            assert_eq!(
                plan_configuration(with_set_by_url, &ours, for_pods, &by_url, "ca"),
                None
            );
        }
        let spec = json!({ "selector": { "matchLabels": { "c": "d" } } });
        let other = SetWebhook::new("ns", "s", None, &serde_json::from_value(spec).unwrap()).unwrap();
        let other = pod_webhooks("ns", [&other], Vec::new());
        let changed = plan(&with_set, Some(&other)).unwrap();
        let selector = &changed.as_array().unwrap().last().unwrap()["objectSelector"];
        assert_eq!(
            *selector,
            json!({ "matchLabels": { "c": "d" } }),
            "nothing is left of the old one"
        );
        assert!(!plan(&with_set, Some(&[])).unwrap().to_string().contains("mpod"));
    }

    #[test]
    fn match_conditions_name_the_manager_namespace() {
        let [ours, _] = configurations("other");
        let patch = plan_configuration(
            &configurations(keys::SYSTEM_NAMESPACE)[0]["webhooks"],
            &ours,
            None,
            &options(None),
            "ca",
        )
        .unwrap();
        let condition = &patch["webhooks"][0]["matchConditions"][0];
        let expected = "request.userInfo.username != 'system:serviceaccount:other:kruise-manager'";
        assert_eq!(condition["expression"], expected);
    }

    #[test]
    fn patch_that_is_undone_is_repeated_later_and_later() {
        let (mut undone, start) = (UndonePatches::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let (one, other) = (json!({ "a": 1 }), json!({ "a": 2 }));
        let pauses = [
            undone.record(&one, at(0)),
            undone.record(&one, at(1)),
            undone.record(&one, at(2)),
        ];
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(pauses, [None, seconds(1), seconds(2)]);
        assert_eq!(undone.record(&other, at(3)), None);
        assert_eq!(undone.record(&other, at(2000)), None, "long after");
    }

    #[test]
    fn added_selectors_are_kept() {
        let [ours, _] = configurations(keys::SYSTEM_NAMESPACE);
        let mut existing = ours["webhooks"].clone();
        existing[0]["namespaceSelector"] = json!({ "matchLabels": { "a": "b" } });
        existing[0]["timeoutSeconds"] = json!(30);
        let patch = plan_configuration(&existing, &ours, None, &options(None), "ca").unwrap();
        for field in ["namespaceSelector", "timeoutSeconds"] {
            assert_eq!(patch["webhooks"][0][field], existing[0][field]);
        }
        assert_eq!(
            patch["webhooks"][1]["timeoutSeconds"],
            ours["webhooks"][1]["timeoutSeconds"]
        );
        assert_eq!(patch["webhooks"][0]["clientConfig"]["caBundle"], "Y2E=");
    }

    #[test]
    fn crd_conversion_converges_from_any_state() {
        let crd = json!({ "spec": { "conversion": { "strategy": "None" } } });
        let mut current = crd;
        for options in [options(None), options(Some("::1")), options(None)] {
            let patch = plan_conversion(&current["spec"]["conversion"], &options, "ca").expect("a patch");
            current = merged(current, &patch);
            assert_eq!(
                plan_conversion(&current["spec"]["conversion"], &options, "ca"),
                None
            );
        }
        let url = client_config(&options(Some("::1")), "ca", "/convert");
        assert_eq!(url["url"], "https://[::1]:9443/convert");
    }
}
