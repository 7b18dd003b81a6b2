PRAGMA application_id = 1836409717;
PRAGMA user_version = 5;
BEGIN TRANSACTION;
CREATE TABLE confirmations (
    environment_id NOT NULL REFERENCES environments, fingerprint, measured_at, versions, findings, load, method,
    PRIMARY KEY (environment_id, fingerprint, measured_at)) WITHOUT ROWID;
INSERT INTO "confirmations" VALUES(1,'0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a','2026-11-23T06:30:00.000002+00:00','{"gemm": 1, "native": 2}','{"step": {"torch_s": 0.2, "time_s": 0.1, "speedup": 2.0, "uncertainty": 0.01, "rounds": 5}, "recorded": {"torch_s": 0.2, "time_s": 0.1, "speedup": 2.0, "uncertainty": 0.01, "rounds": 5}, "convolutions": {"torch_s": 0.2, "time_s": 0.1, "speedup": 2.0, "uncertainty": 0.01, "rounds": 5}, "over_tuned": 1.5, "in_place": [null, {"operations": ["backward_data", "backward_filter"], "call": {"torch_s": 0.2, "time_s": 0.1, "speedup": 2.0, "uncertainty": 0.01, "rounds": 5}, "loses": false}]}',0.0,2);
CREATE TABLE environments (id INTEGER PRIMARY KEY, device, capability, threads, torch, library, compiled, numerics, UNIQUE (device, capability, threads, torch, library, compiled, numerics));
INSERT INTO "environments" VALUES(1,'AMD EPYC','AVX512',2,'2.13.0','oneDNN 3.12.0','avx512','');
CREATE TABLE measurements (environment_id NOT NULL REFERENCES environments, problem_id NOT NULL REFERENCES problems, algorithm, version, micro_batch_size, measured_at, setup_s, step_s, prepared_bytes, scratch_bytes, relative_error, noise, samples, reason, load, method, passed_over, needed_bytes,
    PRIMARY KEY (environment_id, problem_id, algorithm, version, micro_batch_size, measured_at)) WITHOUT ROWID;
INSERT INTO "measurements" VALUES(1,1,'direct',1,4,'2026-11-22T06:30:00.000014+00:00',NULL,NULL,NULL,NULL,NULL,NULL,NULL,'3.0 times the fastest in like problems',NULL,1,1,NULL);
INSERT INTO "measurements" VALUES(1,1,'direct',1,8,'2026-11-22T06:30:00.000018+00:00',1.0e-06,0.0025,64,1099511627776,1.0e-16,0.01,5,NULL,0.0,2,NULL,NULL);
INSERT INTO "measurements" VALUES(1,1,'fft',1,8,'2026-11-22T06:30:00.000001+00:00',NULL,NULL,NULL,NULL,NULL,NULL,NULL,'out of memory',NULL,1,NULL,NULL);
INSERT INTO "measurements" VALUES(1,1,'gemm',1,4,'2026-11-22T06:30:00.000014+00:00',NULL,NULL,NULL,NULL,NULL,NULL,NULL,'needs 12345 bytes of workspace',NULL,1,1,12345);
INSERT INTO "measurements" VALUES(1,1,'gemm',1,8,'2026-11-22T06:30:00.000000+00:00',1.0e-06,0.0025,64,1099511627776,1.0e-16,0.01,5,NULL,NULL,1,NULL,NULL);
INSERT INTO "measurements" VALUES(1,1,'gemm',1,8,'2026-11-23T06:30:00.000000+00:00',1.0e-06,0.0025,64,1099511627776,1.0e-16,0.01,5,NULL,0.0,2,NULL,NULL);
CREATE TABLE problems (id INTEGER PRIMARY KEY, operation, c, h, w, k, r, s, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, groups, dtype, memory_format, UNIQUE (operation, c, h, w, k, r, s, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, groups, dtype, memory_format));
INSERT INTO "problems" VALUES(1,'forward',64,27,28,192,5,4,1,2,2,1,1,3,2,'float32','contiguous');
CREATE TABLE rates (environment_id PRIMARY KEY NOT NULL REFERENCES environments, rate) WITHOUT ROWID;
INSERT INTO "rates" VALUES(1,123.0);
CREATE TABLE verifications (environment_id NOT NULL REFERENCES environments, problem_id NOT NULL REFERENCES problems, configuration, measured_at, baseline_s, time_s, noise, load, method,
    PRIMARY KEY (environment_id, problem_id, configuration, measured_at)) WITHOUT ROWID;
INSERT INTO "verifications" VALUES(1,1,'[["gemm", 1, 8, 1, "fresh"]]','2026-11-22T06:30:00.000005+00:00',2.0,1.00003,0.1,NULL,1);
INSERT INTO "verifications" VALUES(1,1,'[["gemm", 1, 8, 1, "kept"], ["native", 1, 8, 1, "instead"]]','2026-11-22T06:30:00.000007+00:00',2.0,1.0,0.1,NULL,1);
INSERT INTO "verifications" VALUES(1,1,'[["gemm", 1, 8, 1]]','2026-11-22T06:30:00.000002+00:00',2.0,1.00003,0.1,NULL,1);
INSERT INTO "verifications" VALUES(1,1,'[["gemm", 1, 8, 1]]','2026-11-23T06:30:00.000001+00:00',2.0,1.0,0.1,NULL,2);
INSERT INTO "verifications" VALUES(1,1,'[["native", 1, 4, 2]]','2026-11-22T06:30:00.000004+00:00',2.0,1.00003,0.1,NULL,1);
INSERT INTO "verifications" VALUES(1,1,'[["native", 1, 8, 1, "fresh"]]','2026-11-22T06:30:00.000006+00:00',2.0,2.0,0.1,NULL,1);
INSERT INTO "verifications" VALUES(1,1,'[["native", 1, 8, 1]]','2026-11-22T06:30:00.000003+00:00',2.0,2.0,0.1,NULL,1);
COMMIT;
